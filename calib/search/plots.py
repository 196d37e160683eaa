"""Plots of a search: bits over each tensor's cost, and the candidates by size and KL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.calib.search.result import Candidate, Measurement, SearchResult, alike
from diffquant.calib.search.widths import Width, spoken
from diffquant.report.plots import Tips, literal, look, new_figure, plain_log_scale, tidy

# Letters over a coloured cell are dark or light on any page.
_DARK, _LIGHT = "#111111", "#f5f5f5"


def heat_map(result: SearchResult, path: Path) -> None:
    """Draw the KL of each unit at the narrowest width by layer and kind, with the bits that it got in its cell."""
    heat_figure(result).savefig(path, dpi=160)


def heat_figure(result: SearchResult) -> Any:
    """The figure of `heat_map`."""
    from matplotlib.colors import LogNorm

    kinds = list(dict.fromkeys(m.kind for m in result.measurements))
    layers = 1 + max(m.layer for m in result.measurements)
    narrowest = result.widths[-1]
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
            fontsize=8 if len(str(measurement.chosen)) < 3 else 5,
            fontweight="bold" if measurement.chosen != narrowest else "normal",
            color=_DARK if shade > 0.5 else _LIGHT,
        )
    axis.set_yticks(range(len(kinds)), [kind.removeprefix("self_attn.").removeprefix("mlp.") for kind in kinds])
    axis.set_xticks(range(layers), [str(n) if n % 5 == 0 or layers <= 12 else "" for n in range(layers)])
    axis.set_xlabel("layer")
    axis.set_title(literal(f"{result.model}, {result.budget}: bits given to each tensor"), fontsize=11)
    bar = figure.colorbar(image, ax=axis, pad=0.01)
    bar.set_label(f"KL at {spoken(narrowest)} alone, nats")
    return figure


def _shown(measurement: Measurement | None, width: Width) -> Any:
    return float("nan") if measurement is None else max(measurement.kl[width], 1e-9)


def plot_pareto(results: Sequence[SearchResult], path: Path) -> None:
    """Draw the candidates of searches by size and KL, a panel for each model and its targets."""
    groups = alike(results)
    figure = new_figure(6.4 * len(groups), 4.2)
    for axis, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        draw_pareto(axis, group)
    figure.savefig(path, dpi=160)


def draw_pareto(axis: Any, results: Sequence[SearchResult], tips: Tips | None = None) -> None:
    """Draw searches of one model: uniform widths as a line, what was searched and what was spread evenly as points.

    Sizes are bytes of the checkpoint, or mean stored bits of the targets where these are not in the checkpoint.
    """
    is_stored = "weights" in results[0].candidates[0].bits
    unit = "MB" if is_stored else "bits"
    families: dict[str, dict[str, Candidate]] = {"uniform": {}, "spread evenly": {}, "searched": {}}
    for result in results:
        for candidate in result.candidates:
            is_uniform = candidate.name.startswith("uniform")
            name = candidate.name if is_uniform else f"{candidate.name}, {result.budget}"
            families["uniform" if is_uniform else candidate.name][name] = candidate
    for number, (family, candidates) in enumerate(families.items()):
        points = sorted((_size(each, is_stored), each.kl, name) for name, each in candidates.items())
        style = look(number)
        style["linestyle"] = "-" if family == "uniform" else "none"
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], markersize=7, label=family, **style)
        for x, y, name in points:
            if tips:
                tips.mark(axis, x, y, f"{name}: {x:.4g} {unit}, KL {y:.3g}")
            axis.annotate(literal(name), (x, y), (7, 4), textcoords="offset points", fontsize=7.5)
    kls = [candidate.kl for candidates in families.values() for candidate in candidates.values()]
    # Weights that lie on a width's grid are kept, and have no logarithm.
    if min(kls) > 0:
        axis.set_ylim(0.6 * min(kls), 1.8 * max(kls))
        plain_log_scale(axis)
    axis.margins(x=0.18)
    axis.set_xlabel(
        "checkpoint, MB" if is_stored else f"stored bits, mean over {', '.join(results[0].candidates[0].bits)}"
    )
    axis.set_ylabel("KL on text held out, nats")
    axis.set_title(literal(results[0].model), fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    tidy(axis, "both")


def _size(candidate: Candidate, is_stored: bool) -> float:
    return candidate.nbytes / 1e6 if is_stored else sum(candidate.bits.values()) / len(candidate.bits)
