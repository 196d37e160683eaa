"""The result of a search, as plain data."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffquant.calib.search.widths import Width
from diffquant.recipe import Recipe
from diffquant.support.plain_data import parse_json
from diffquant.support.xz import named, read_text


@dataclass(frozen=True)
class Candidate:
    """A recipe, measured on the text held out.

    Attributes:
        name: name such as "searched", "spread evenly" or "uniform 4".
        bits: mean stored bits by target, scales included.
        nbytes: size of the checkpoint that `quantize` would write.
        predicted: sum of its units' costs, or None if a width was not measured.
        kl: mean KL(16 bits || this) of the next-token distributions, in nats.
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
    """The cost of a unit at each width, and the width that it got.

    Attributes:
        name: name of the unit.
        target: "weights", "k", "v" or "logits".
        layer: number of its layer.
        kind: name inside a layer, such as "mlp.up_proj".
        elements: number of entries that have its width.
        kl: cost of each width in nats, as `Cost.kl`, the widest first.
        attention: error at its attention's output, as `Cost.attention`.
        chosen: width that it got; None for a part, which gets none of its own.
    """

    name: str
    target: str
    layer: int
    kind: str
    elements: int
    kl: dict[Width, float]
    attention: dict[Width, float | None]
    chosen: Width | None


@dataclass(frozen=True)
class SearchResult:
    """The recipe that a search chose, with what it was chosen by and compared with.

    Attributes:
        model: name of the checkpoint's folder or file.
        budget: budget as text.
        perplexity: perplexity of the 16-bit model on the text held out.
        candidates: recipes that were compared, the searched one first.
        measurements: costs of the units.
        recipe: searched recipe.
        settings: all that the measurements depend on.
        parts: costs of parts of layers, as `find_parts` has them; None if they were not asked for.
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
        """Widths that were measured, the widest first."""
        return list(self.measurements[0].kl)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model, whose folder may be called as another's is."""
        return str(self.settings["model"])

    def to_json(self) -> str:
        """The result as a JSON document."""
        return json.dumps(asdict(self) | {"recipe": self.recipe.to_dict()}, indent=1) + "\n"


def read_search(file: Path) -> SearchResult:
    """The result in a search-*.json."""
    data = parse_json(read_text(file))
    there = [key for key in ("measurements", "parts") if data.get(key) is not None]
    measured = {key: [_measurement(unit) for unit in data[key]] for key in there}
    candidates = [Candidate(**candidate) for candidate in data["candidates"]]
    recipe = Recipe.from_dict(data["recipe"])
    return SearchResult(**data | measured | {"candidates": candidates, "recipe": recipe})


def _measurement(unit: dict[str, Any]) -> Measurement:
    by_width = {
        name: {int(width) if width.isdecimal() else width: cost for width, cost in unit[name].items()}
        for name in _BY_WIDTH
    }
    return Measurement(**unit | by_width)


def read_searches(folder: Path) -> list[SearchResult]:
    """The results in a folder, by their files' names."""
    return [read_search(file) for file in named(folder, "search-*.json")]


def alike(results: Sequence[SearchResult]) -> list[list[SearchResult]]:
    """Results of the same model and targets together, which one chart can hold."""
    groups: dict[tuple[str, ...], list[SearchResult]] = {}
    for result in results:
        groups.setdefault((result.fingerprint, *result.candidates[0].bits), []).append(result)
    return list(groups.values())


_BY_WIDTH = ("kl", "attention")
