"""A plot of the cumulative average NLL by position, one line a model and width, one panel a target.

Source: the presentation follows figure 4 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.evals.stats import mean_interval
from diffquant.evals.task import PlottedCell
from diffquant.report.plots import literal, look, new_figure, tidy


@dataclass(frozen=True)
class PositionLine:
    """One model at one width: (position, mean NLL up to it, low, high) in nats, over windows of a text."""

    model: str
    scheme: str
    points: tuple[tuple[int, float, float, float], ...]


def position_panels(cells: Sequence[PlottedCell]) -> dict[str, list[PositionLine]]:
    """Each panel's lines by its title: every model at 16 bits, and at each width of that panel."""
    full = [_line(cell) for cell in cells if cell.is_baseline]
    narrow: dict[str, list[PositionLine]] = {}
    for cell in cells:
        if not cell.is_baseline:
            narrow.setdefault(cell.panel, []).append(_line(cell))
    return {title: full + lines for title, lines in narrow.items()} or ({"16 bits": full} if full else {})


def plot_positions(cells: Sequence[PlottedCell], path: Path) -> None:
    """Draw the cumulative NLL into a file, whose suffix says the format.

    Raises:
        UsageError: nothing was measured.
    """
    panels = position_panels(cells)
    if not panels:
        raise UsageError("nothing to plot: no cell of nll was measured")
    models = list(dict.fromkeys(line.model for lines in panels.values() for line in lines))
    figure = new_figure(2.4 + 4.4 * len(panels), 4.6)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        schemes = list(dict.fromkeys(line.scheme for line in lines))
        for line in lines:
            # A colour a model, a line style and marker a width.
            style = look(schemes.index(line.scheme))
            style["color"] = look(models.index(line.model))["color"]
            positions, means, lows, highs = zip(*line.points, strict=True)
            axis.plot(positions, means, label=literal(f"{line.model}, {line.scheme}"), markersize=4, **style)
            if max(highs) < float("inf"):
                axis.fill_between(positions, lows, highs, color=style["color"], alpha=0.08, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens read")
        axis.set_title(title, fontsize=11)
        axis.legend(fontsize=8, frameon=False)
        tidy(axis)
    axes[0].set_ylabel("cumulative average NLL, nats\n(shaded: 95 % over windows)")
    figure.savefig(path, dpi=200)


def _line(cell: PlottedCell) -> PositionLine:
    details = cell.result.details
    by_position = zip(*details["cumulative_nll_by_window"], strict=True)
    points = []
    for position, values in zip(details["positions"], by_position, strict=True):
        interval = mean_interval(values)
        points.append((position, interval.mean, interval.low, interval.high))
    return PositionLine(cell.model, cell.scheme, tuple(points))
