"""The result of a search for people: the comparison on text held out, the recipe, a heat map of layers and tensors."""

import itertools
import math
from pathlib import Path
from typing import Any

from diffquant.calib.search.result import Candidate, Measurement, SearchResult
from diffquant.report.plots import literal, new_figure
from diffquant.report.tables import aligned, megabytes
from diffquant.support.files import write_atomically

# Shares of a way from one width to the next that count as the same place.
_ALIKE = 0.02


def search_table(result: SearchResult) -> str:
    """A table of the candidates on the text held out, and how the search compares with uniform bits of its size."""
    head = ["recipe", "stored bits", "checkpoint", "perplexity", "KL", "predicted KL"]
    lines = [["16 bits", "16", "", f"{result.perplexity:.3f}", "", ""], *map(_cells, result.candidates)]
    return "\n".join([*aligned(head, lines, names=2), "", verdict(result)])


def verdict(result: SearchResult) -> str:
    """A sentence that compares the searched recipe with uniform bits of the same size, by the KL measured."""
    searched = result.candidates[0]
    uniform = uniform_kl(result)
    rival = "" if uniform is None else f"{uniform:.4g} of uniform widths that store as much (interpolated), "
    even = next(c for c in result.candidates if c.name == "spread evenly")
    return (
        f"budget {result.budget}: KL {searched.kl:.4g} on text held out, against {rival}{even.kl:.4g} of the same "
        "widths spread evenly"
    )


def uniform_kl(result: SearchResult) -> float | None:
    """The KL of uniform widths at the searched recipe's stored bits, between two of them interpolated in log KL.

    None where no two lie on both sides, or the targets lie at different places between them.
    """
    searched = result.candidates[0].bits
    uniform = [candidate for candidate in result.candidates if candidate.name.startswith("uniform")]
    for low, high in itertools.pairwise(uniform):
        steps = {target: high.bits[target] - low.bits[target] for target in searched}
        # Short rows end in a half-filled word, where a wider code may come for nothing.
        if not all(steps.values()):
            continue
        shares = [(searched[target] - low.bits[target]) / step for target, step in steps.items()]
        if min(shares) >= 0 and max(shares) <= min(1, min(shares) + _ALIKE):
            return math.exp((1 - shares[0]) * math.log(low.kl) + shares[0] * math.log(high.kl))
    return None


def write_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write recipe.yaml, search.json and search.png, named after the budget."""
    stem = result.budget.replace(" ", "-")
    recipe, data, picture = (folder / f"{name}-{stem}.{end}" for name, end in _FILES)
    write_atomically(recipe, result.recipe.to_yaml())
    write_atomically(data, result.to_json())
    heat_map(result, picture)
    return [recipe, data, picture]


_FILES = (("recipe", "yaml"), ("search", "json"), ("search", "png"))


def heat_map(result: SearchResult, path: Path) -> None:
    """Draw the KL of each unit at the narrowest width by layer and kind, with the bits that it got in its cell."""
    from matplotlib.colors import LogNorm

    kinds = list(dict.fromkeys(m.kind for m in result.measurements))
    layers = 1 + max(m.layer for m in result.measurements)
    narrowest = min(result.measurements[0].kl)
    at = {(m.kind, m.layer): m for m in result.measurements}
    values = [[_shown(at.get((kind, layer)), narrowest) for layer in range(layers)] for kind in kinds]
    drawn = [value for row in values for value in row if value == value]
    figure = new_figure(max(6.0, 2.6 + 0.33 * layers), 1.9 + 0.36 * len(kinds))
    axis = figure.subplots()
    norm = LogNorm(min(drawn), max(*drawn, min(drawn) * 1.01))
    image = axis.imshow(values, cmap="cividis", norm=norm, aspect="auto")
    for (kind, layer), measurement in at.items():
        shade = norm(_shown(measurement, narrowest))
        axis.text(
            layer,
            kinds.index(kind),
            str(measurement.chosen),
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold" if measurement.chosen > narrowest else "normal",
            color="black" if shade > 0.5 else "white",
        )
    axis.set_yticks(range(len(kinds)), [kind.removeprefix("self_attn.").removeprefix("mlp.") for kind in kinds])
    axis.set_xticks(range(layers), [str(n) if n % 5 == 0 or layers <= 12 else "" for n in range(layers)])
    axis.set_xlabel("layer")
    axis.set_title(literal(f"{result.model}, {result.budget}: bits given to each tensor"), fontsize=11)
    bar = figure.colorbar(image, ax=axis, pad=0.01)
    bar.set_label(f"KL at {narrowest} bits alone, nats")
    figure.savefig(path, dpi=200)


def _shown(measurement: Measurement | None, bits: int) -> Any:
    return float("nan") if measurement is None else max(measurement.kl[bits], 1e-9)


def _cells(candidate: Candidate) -> list[str]:
    bits = ", ".join(
        f"{mean:.2f}" if len(candidate.bits) == 1 else f"{t} {mean:.2f}" for t, mean in candidate.bits.items()
    )
    predicted = "-" if candidate.predicted is None else f"{candidate.predicted:.4g}"
    return [
        candidate.name,
        bits,
        megabytes(candidate.nbytes),
        f"{candidate.perplexity:.3f}",
        f"{candidate.kl:.4g}",
        predicted,
    ]
