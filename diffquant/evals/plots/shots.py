"""A plot of many-shot accuracy against the number of demonstrations, one line a model and width, one panel a target.

Source: the presentation follows figure 6 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.evals.plots.lines import Line, draw_panels, panels
from diffquant.evals.stats import Estimate, estimate
from diffquant.evals.task import PlottedCell
from diffquant.report.plots import Look


def shots_panels(cells: Sequence[PlottedCell]) -> dict[str, list[Line]]:
    """Each panel's lines by its title, over two or more numbers of demonstrations.

    A point is (shots, accuracy in percent, standard error), few shots first.
    """
    scores: dict[tuple[str, str, str | None], dict[int, Estimate]] = {}
    for cell in cells:
        line = (cell.model, cell.scheme, None if cell.is_baseline else cell.panel)
        # Of two tasks with as many shots, such as 6 and 6:5, the one named later.
        scores.setdefault(line, {})[cell.result.shots or 0] = estimate(cell.result.values or [])
    return panels(
        (title, _line(model, scheme, by_shots))
        for (model, scheme, title), by_shots in scores.items()
        if len(by_shots) > 1
    )


def plot_shots(cells: Sequence[PlottedCell], path: Path) -> None:
    """Draw many-shot accuracy into a file, whose suffix says the format.

    Raises:
        UsageError: nothing was measured at two numbers of demonstrations.
    """
    shown = shots_panels(cells)
    if not shown:
        raise UsageError("nothing to plot: no model was measured at two numbers of demonstrations")
    draw_panels(shown, _draw, _finish, "accuracy, %\n(± 1 standard error)", path)


def _line(model: str, scheme: str, by_shots: dict[int, Estimate]) -> Line:
    points = ((shots, 100 * score.mean, 100 * (score.se or 0.0)) for shots, score in sorted(by_shots.items()))
    return Line(model, scheme, tuple(points))


def _draw(axis: Any, line: Line, label: str, style: Look) -> None:
    shots, accuracies, errors = zip(*line.points, strict=True)
    axis.errorbar(
        shots, accuracies, yerr=errors, label=label, markersize=4, linewidth=1.4, elinewidth=0.8, capsize=2, **style
    )


def _finish(axis: Any, lines: list[Line]) -> None:
    axis.set_xscale("log")
    ticks = sorted({shots for line in lines for shots, *_ in line.points})
    axis.set_xticks(ticks, [str(shots) for shots in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("demonstrations")
