"""A plot of the cumulative average NLL by position, one line a model and width, one panel a target.

Source: the presentation follows figure 4 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.evals.plots.lines import Line, draw_panels, panels
from diffquant.evals.stats import mean_interval
from diffquant.evals.task import PlottedCell
from diffquant.report.plots import Look


def position_panels(cells: Sequence[PlottedCell]) -> dict[str, list[Line]]:
    """Each panel's lines by its title: (position, mean NLL up to it, low, high) in nats, over windows of a text."""
    return panels((None if cell.is_baseline else cell.panel, _line(cell)) for cell in cells)


def plot_positions(cells: Sequence[PlottedCell], path: Path) -> None:
    """Draw the cumulative NLL into a file, whose suffix says the format.

    Raises:
        UsageError: nothing was measured.
    """
    shown = position_panels(cells)
    if not shown:
        raise UsageError("nothing to plot: no cell of nll was measured")
    draw_panels(shown, _draw, _finish, "cumulative average NLL, nats\n(shaded: 95 % over windows)", path)


def _line(cell: PlottedCell) -> Line:
    details = cell.result.details
    by_position = zip(*details["cumulative_nll_by_window"], strict=True)
    points = []
    for position, values in zip(details["positions"], by_position, strict=True):
        interval = mean_interval(values)
        points.append((position, interval.mean, interval.low, interval.high))
    return Line(cell.model, cell.scheme, tuple(points))


def _draw(axis: Any, line: Line, label: str, style: Look) -> None:
    positions, means, lows, highs = zip(*line.points, strict=True)
    axis.plot(positions, means, label=label, markersize=4, **style)
    if max(highs) < float("inf"):
        axis.fill_between(positions, lows, highs, color=style["color"], alpha=0.08, linewidth=0)


def _finish(axis: Any, lines: list[Line]) -> None:  # noqa: ARG001
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens read")
