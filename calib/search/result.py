"""The result of a search as plain data, and the KL per saved bit of each kind of tensor.

The KL per saved bit is the KL of rounding only tensors of one kind, divided by the bits saved. If parts of layers were
measured, the kinds are finer. Each map's queries are a kind, as are its keys if the maps do not share them, and each
layer's experts. λ and gates are then included, although they stay at 16 bits unless an override names them.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.scheme import Scheme
from diffquant.reports.tables import Table
from diffquant.support.files import list_matching_files, read_text_or_xz
from diffquant.support.plain_data import parse_json

Width = int | str
INTEGERS: tuple[Width, ...] = tuple(range(2, 9))


def format_width(width: Width) -> str:
    """Format a width for messages: "4 bits", "nvfp4"."""
    return f"{width} bits" if isinstance(width, int) else width


def count_code_bits(width: Width) -> int:
    """Return the number of bits of one code of this width, without scales."""
    return format_named(str(width)).code_width


def scheme_at(width: Width, granularity: str, target: str = "") -> Scheme:
    """Return the scheme with a width and a granularity.

    Args:
        granularity: granularity of the scales; formats with fixed blocks, such as NVFP4, ignore it.
        target: target that is quantized, such as "weights", or "" if unknown; see `Scheme.parse`.
    """
    own = format_named(str(width)).block
    return Scheme.parse(str(width) if own else f"{width}:{granularity}", target=target)


@dataclass(frozen=True)
class Candidate:
    """A recipe and its quality on held-out text.

    Attributes:
        name: name such as "searched", "spread evenly" or "uniform 4".
        bits: mean stored bits by target, scales included.
        nbytes: size of the checkpoint that `quantize` would write.
        predicted: sum of the units' measured costs in nats, or None if a width was not measured.
        kl: mean KL(16-bit model || recipe) of the next-token distributions, in nats.
        perplexity: perplexity of the text.
    """

    name: str
    bits: dict[str, float]
    nbytes: int
    predicted: float | None
    kl: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The cost of a unit at each width, and its chosen width.

    Attributes:
        name: name of the unit.
        target: "weights", "k", "v" or "logits".
        layer: index of its layer.
        kind: name inside a layer, such as "mlp.up_proj".
        elements: number of its elements; see `Unit.elements`.
        kl: KL in nats by width, the widest first; see `Sensitivity.measure_cost`.
        chosen: chosen width, or None if the unit is only measured and gets no width (see `find_unassigned_units`).
    """

    name: str
    target: str
    layer: int
    kind: str
    elements: int
    kl: dict[Width, float]
    chosen: Width | None


@dataclass(frozen=True)
class SearchResult:
    """The recipe that a search chose, with the measured costs and the recipes it was compared with.

    Attributes:
        model: name of the checkpoint's folder or file.
        budget: budget as text.
        perplexity: perplexity of the 16-bit model on held-out text.
        candidates: compared recipes, the searched one first.
        measurements: costs of the units.
        recipe: searched recipe.
        settings: settings that the measurements depend on.
        parts: costs of the units that get no width (see `find_unassigned_units`), or None if they were not measured.
    """

    model: str
    budget: str
    perplexity: float
    candidates: list[Candidate]
    measurements: list[Measurement]
    recipe: Recipe
    settings: dict[str, Any]
    parts: list[Measurement] | None = None

    @property
    def widths(self) -> list[Width]:
        """Measured widths, the widest first."""
        return list(self.measurements[0].kl)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; the folder's name may not be unique."""
        return str(self.settings["model"])

    def to_json(self) -> str:
        """Return the result as a JSON document."""
        return json.dumps(asdict(self) | {"recipe": self.recipe.to_dict()}, indent=1) + "\n"


def read_search(file: Path) -> SearchResult:
    """Read a search's result from its search-*.json file."""
    data = parse_json(read_text_or_xz(file))
    there = [key for key in ("measurements", "parts") if data.get(key) is not None]
    measured = {key: [_measurement(unit) for unit in data[key]] for key in there}
    candidates = [Candidate(**candidate) for candidate in data["candidates"]]
    recipe = Recipe.from_dict(data["recipe"])
    return SearchResult(**data | measured | {"candidates": candidates, "recipe": recipe})


def _measurement(unit: dict[str, Any]) -> Measurement:
    known = {name: unit[name] for name in Measurement.__dataclass_fields__}  # earlier versions wrote more
    kl = {int(width) if width.isdecimal() else width: cost for width, cost in known.pop("kl").items()}
    return Measurement(kl=kl, **known)


def read_searches(folder: Path) -> list[SearchResult]:
    """Read the results from all search-*.json files of a folder, ordered by file name."""
    return [read_search(file) for file in list_matching_files(folder, "search-*.json")]


def group_searches(results: Sequence[SearchResult]) -> list[list[SearchResult]]:
    """Group results by model and targets; each group is drawn in one chart."""
    groups: dict[tuple[str, ...], list[SearchResult]] = {}
    for result in results:
        groups.setdefault((result.fingerprint, *result.candidates[0].bits), []).append(result)
    return list(groups.values())


_UNROUNDED = 16


def group_by_kind(result: SearchResult) -> dict[tuple[str, str], list[Measurement]]:
    """Group the units of all layers by (kind, target), those with most KL per saved bit (narrowest width) first.

    If parts of layers were measured, each layer's experts are also a separate group, named after the layer.
    """
    kinds: dict[tuple[str, str], list[Measurement]] = {}
    for unit in [*result.measurements, *(result.parts or [])]:
        kinds.setdefault((unit.kind, unit.target), []).append(unit)
        if result.parts is not None and ".experts." in unit.kind:
            kinds[f"{unit.kind}, layer {unit.layer}", unit.target] = [unit]
    return dict(sorted(kinds.items(), key=lambda each: -kl_per_megabit(each[1], result.widths[-1])))


def kl_per_megabit(units: Sequence[Measurement], width: Width) -> float:
    """Return the KL in nats per million bits that a width saves against 16 bits, not counting scales.

    The KL is the sum over the units, each measured with only that unit rounded.
    """
    saved = sum(unit.elements for unit in units) * (_UNROUNDED - count_code_bits(width))
    return sum(unit.kl[width] for unit in units) / (saved / 1e6)


def kinds_table(result: SearchResult) -> Table:
    """Return a table with a row for each kind of tensor, in the order of `group_by_kind`.

    It shows the KL per million saved bits at each width, and the layer with the largest KL at the narrowest width.
    """
    heads = ["kind", "target", *(f"KL per Mbit at {format_width(width)}" for width in result.widths), "worst layer"]
    lines = []
    for kind, units in group_by_kind(result).items():
        worst = max(units, key=lambda unit: unit.kl[result.widths[-1]])
        lines.append([*kind, *(f"{kl_per_megabit(units, width):.3g}" for width in result.widths), str(worst.layer)])
    return Table(heads, lines, names=2)


# Largest difference between targets' positions between two uniform widths (0 to 1) that counts as equal.
_ALIKE = 0.02


def interpolate_uniform_kl(result: SearchResult) -> float | None:
    """Interpolate the KL of uniform widths at the searched recipe's stored bits, linearly in log KL.

    Returns:
        The KL in nats, or None if no two neighbouring uniform widths are suitable. Their KLs must be above 0, and the
        recipe's stored bits must lie between theirs, at nearly the same fraction of the interval for every target.
    """
    searched = result.candidates[0].bits
    uniform = [candidate for candidate in result.candidates if candidate.name.startswith("uniform")]
    for low, high in itertools.pairwise(uniform):
        steps = {target: high.bits[target] - low.bits[target] for target in searched}
        # A wider code may not need more bytes: packed rows are padded to whole words.
        if not all(steps.values()) or min(low.kl, high.kl) <= 0:
            continue
        shares = [(searched[target] - low.bits[target]) / step for target, step in steps.items()]
        if min(shares) >= 0 and max(shares) <= min(1, min(shares) + _ALIKE):
            return math.exp((1 - shares[0]) * math.log(low.kl) + shares[0] * math.log(high.kl))
    return None
