"""A plot of many-shot accuracy against the number of demonstrations, one line a model and width, one panel a target.

Source: the presentation follows figure 6 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.stats import standard_error
from diffquant.reports.plots import IntervalPoint, Look, PlotLine
from examples.shots.panels import draw_panels, panels


def shots_panels(cells: Sequence[tuple[str, Cell]]) -> dict[str, list[PlotLine]]:
    """Each panel's lines by its title, over two or more numbers of demonstrations.

    A point is (shots, accuracy in percent with one standard error to both sides), few shots first.
    """
    scores: dict[tuple[str, str, str | None], dict[int, IntervalPoint]] = {}
    for model, cell in cells:
        if cell.result is not None:
            line = (model, cell.point.scheme_text, None if cell.point.is_baseline else cell.point.panel)
            # Of two tasks with as many shots, such as 6 and 6:5, the one named later.
            shots = cell.result.details.get("shots") or 0
            scores.setdefault(line, {})[shots] = _accuracy(shots, cell.result.values or [])
    return panels(
        (title, PlotLine(model, tuple(sorted(by_shots.values())), scheme))
        for (model, scheme, title), by_shots in scores.items()
        if len(by_shots) > 1
    )


def plot_shots(cells: Sequence[tuple[str, Cell]], path: Path) -> None:
    """Draw many-shot accuracy into a file, whose suffix says the format.

    Raises:
        UsageError: nothing was measured at two numbers of demonstrations.
    """
    shown = shots_panels(cells)
    if not shown:
        raise UsageError("nothing to plot: no model was measured at two numbers of demonstrations")
    draw_panels(shown, _draw, _finish, "accuracy, %\n(± 1 standard error)", path)


def _accuracy(shots: int, values: Sequence[float]) -> IntervalPoint:
    mean, error = 100 * sum(values) / len(values), 100 * (standard_error(values) or 0.0)
    return IntervalPoint(shots, mean, mean - error, mean + error)


def _draw(axis: Any, line: PlotLine, label: str, style: Look) -> None:
    shots, accuracies, _, highs, _ = zip(*line.points, strict=True)
    errors = [high - accuracy for high, accuracy in zip(highs, accuracies, strict=True)]
    axis.errorbar(
        shots, accuracies, yerr=errors, label=label, markersize=4, linewidth=1.4, elinewidth=0.8, capsize=2, **style
    )


def _finish(axis: Any, lines: list[PlotLine]) -> None:
    axis.set_xscale("log")
    ticks = sorted({point.x for line in lines for point in line.points})
    axis.set_xticks(ticks, [f"{shots:g}" for shots in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("demonstrations")
