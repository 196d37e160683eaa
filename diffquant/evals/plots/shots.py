"""Many-shot accuracy against the number of demonstrations, one line a model and width, one panel a target.

Source: the presentation follows figure 6 of arXiv 2410.05258.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.evals.stats import estimate
from diffquant.report.plots import COLOURS, MARKERS, STYLES
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.plot import TITLES
from diffquant.sweep.result import SweepResult, model_names

SHOTS = "shots"


@dataclass(frozen=True)
class Line:
    """One model at one width: (shots, accuracy in percent, standard error), few shots first."""

    model: str
    scheme: str
    points: tuple[tuple[int, float, float], ...]


def panels(sweep: SweepResult) -> dict[str, list[Line]]:
    """What is drawn: by target and granularity every model at 16 bits and at each width, over two shots or more."""
    full: list[Line] = []
    narrow: dict[str, list[Line]] = {}
    for point in sweep.points:
        line = _line(sweep, point)
        if len(line.points) > 1:
            (full if point.is_baseline else narrow.setdefault(_panel(point), [])).append(line)
    return {name: full + lines for name, lines in narrow.items()} or ({"16 bits": full} if full else {})


def plot_shots(sweep: SweepResult, path: Path) -> None:
    """Draw into a file; its suffix says the format.

    Raises:
        UsageError: nothing was measured at two numbers of demonstrations.
    """
    from matplotlib.figure import Figure

    shown = panels(sweep)
    if not shown:
        raise UsageError("nothing to plot: no model was measured at two numbers of demonstrations")
    models = list(dict.fromkeys(line.model for lines in shown.values() for line in lines))
    figure = Figure(figsize=(2.4 + 4.4 * len(shown), 4.6), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, shown.items(), strict=True):
        _draw(axis, title, lines, models)
    axes[0].set_ylabel("accuracy, %\n(± 1 standard error)")
    figure.savefig(path, dpi=200)


def _line(sweep: SweepResult, point: Point) -> Line:
    found = [cell.result for cell in sweep.cells if cell.point is point and cell.result and SHOTS in cell.result]
    # Of two tasks with as many shots, such as 6 and 6:5, the one named later.
    scores = {result[SHOTS]: estimate(result["values"]) for result in found}
    return Line(
        model_names([each.model for each in sweep.points])[point.model],
        point.scheme,
        tuple((shots, 100 * score.mean, 100 * (score.se or 0.0)) for shots, score in sorted(scores.items())),
    )


def _panel(point: Point) -> str:
    title = TITLES.get(point.target, point.target)
    return title if point.target in (EXPORTED, RECIPE) else f"{title}, per {point.granularity}"


def _draw(axis: Any, title: str, lines: list[Line], models: list[str]) -> None:
    schemes = list(dict.fromkeys(line.scheme for line in lines))
    for line in lines:
        style = schemes.index(line.scheme)
        shots, accuracies, errors = zip(*line.points, strict=True)
        axis.errorbar(
            shots,
            accuracies,
            yerr=errors,
            label=f"{line.model}, {line.scheme}",
            color=COLOURS[models.index(line.model) % len(COLOURS)],
            linestyle=STYLES[style % len(STYLES)],
            marker=MARKERS[style % len(MARKERS)],
            markersize=4,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=2,
        )
    axis.set_xscale("log")
    ticks = sorted({shots for line in lines for shots, _, _ in line.points})
    axis.set_xticks(ticks, [str(shots) for shots in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("demonstrations")
    axis.set_title(title, fontsize=11)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
