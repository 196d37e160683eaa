"""A plot of many-shot accuracy against the number of demonstrations, one line a model and width, one panel a target.

Source: the presentation follows figure 6 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.evals.stats import Estimate, estimate
from diffquant.evals.task import PlottedCell
from diffquant.report.plots import literal, look, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ShotsLine:
    """One model at one width: (shots, accuracy in percent, standard error), few shots first."""

    model: str
    scheme: str
    points: tuple[tuple[int, float, float], ...]


def shots_panels(cells: Sequence[PlottedCell]) -> dict[str, list[ShotsLine]]:
    """Each panel's lines by its title: every model at 16 bits and at each width, over two or more numbers of shots."""
    scores: dict[tuple[str, str, str, bool], dict[int, Estimate]] = {}
    for cell in cells:
        line = (cell.model, cell.panel, cell.scheme, cell.is_baseline)
        # Of two tasks with as many shots, such as 6 and 6:5, the one named later.
        scores.setdefault(line, {})[cell.result.shots or 0] = estimate(cell.result.values or [])
    full: list[ShotsLine] = []
    narrow: dict[str, list[ShotsLine]] = {}
    for (model, panel, scheme, is_baseline), by_shots in scores.items():
        if len(by_shots) > 1:
            (full if is_baseline else narrow.setdefault(panel, [])).append(_make_line(model, scheme, by_shots))
    return {name: full + lines for name, lines in narrow.items()} or ({"16 bits": full} if full else {})


def plot_shots(cells: Sequence[PlottedCell], path: Path) -> None:
    """Draw many-shot accuracy into a file, whose suffix says the format.

    Raises:
        UsageError: nothing was measured at two numbers of demonstrations.
    """
    shown = shots_panels(cells)
    if not shown:
        raise UsageError("nothing to plot: no model was measured at two numbers of demonstrations")
    models = list(dict.fromkeys(line.model for lines in shown.values() for line in lines))
    figure = new_figure(2.4 + 4.4 * len(shown), 4.6)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, shown.items(), strict=True):
        _draw(axis, title, lines, models)
    axes[0].set_ylabel("accuracy, %\n(± 1 standard error)")
    figure.savefig(path, dpi=200)


def _make_line(model: str, scheme: str, by_shots: dict[int, Estimate]) -> ShotsLine:
    points = ((shots, 100 * score.mean, 100 * (score.se or 0.0)) for shots, score in sorted(by_shots.items()))
    return ShotsLine(model, scheme, tuple(points))


def _draw(axis: "Axes", title: str, lines: list[ShotsLine], models: list[str]) -> None:
    schemes = list(dict.fromkeys(line.scheme for line in lines))
    for line in lines:
        # A colour a model, a line style and marker a width.
        style = look(schemes.index(line.scheme))
        style["color"] = look(models.index(line.model))["color"]
        shots, accuracies, errors = zip(*line.points, strict=True)
        axis.errorbar(
            shots,
            accuracies,
            yerr=errors,
            label=literal(f"{line.model}, {line.scheme}"),
            markersize=4,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=2,
            **style,
        )
    axis.set_xscale("log")
    ticks = sorted({shots for line in lines for shots, _, _ in line.points})
    axis.set_xticks(ticks, [str(shots) for shots in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("demonstrations")
    axis.set_title(title, fontsize=11)
    axis.legend(fontsize=8, frameon=False)
    tidy(axis)
