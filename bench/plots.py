"""Plots of latency, speed and memory with a panel per shape, readable in print and without colours.

A section with several context lengths is plotted as lines over length, one with a single length as a row per path.
"""

from collections.abc import Sequence
from typing import Any

from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.reports.plots import (
    IntervalPoint,
    Tips,
    add_tooltip,
    draw_intervals,
    escape_dollars,
    new_figure,
    series_style,
    set_log_y_scale,
    style_axis,
)

_PANELS_A_ROW = 2


def plot_names(section: str) -> tuple[str, str]:
    """Return the names of a section's two plots: of time or speed, and of memory."""
    return f"{section}-time", f"{section}-memory"


def plots(result: BenchResult) -> dict[str, tuple[str, Any, Tips]]:
    """Plot every section whose cells have lengths.

    Returns:
        Title, figure and tooltips of each plot, by its name in `plot_names`.
    """
    drawn: dict[str, tuple[str, Any, Tips]] = {}
    for section in dict.fromkeys(cell.section for cell in result.cells):
        cells = [cell for cell in result.cells if cell.section == section and cell.values and cell.length]
        if not cells:
            continue
        what = "tokens per second" if cells[0].unit == "tokens/s" else "milliseconds per call"
        of_time, of_memory = plot_names(section)
        drawn[of_time] = f"{section}: {what}", *_figure(cells, what, _time)
        if any(cell.peak_bytes for cell in cells):
            label = "peak memory beyond the inputs, MB"
            drawn[of_memory] = f"{section}: {label}", *_figure(cells, label, _megabytes)
    return drawn


def _time(cell: BenchCell) -> tuple[float, float, float] | None:
    return (cell.median, min(cell.values), max(cell.values)) if cell.median else None


def _megabytes(cell: BenchCell) -> tuple[float, float, float] | None:
    # None if 0, which a logarithmic axis cannot show.
    value = (cell.peak_bytes or 0) / 1e6
    return (value, value, value) if value else None


def _figure(cells: Sequence[BenchCell], label: str, value: Any) -> tuple[Any, Tips]:
    panels: dict[str, list[BenchCell]] = {}
    for cell in cells:
        panels.setdefault(_panel(cell), []).append(cell)
    paths, tips = list(dict.fromkeys(cell.path for cell in cells)), list[str]()
    if len({cell.length for cell in cells}) == 1:
        return _dots(panels, paths, label, value, tips), tips
    return _lines(panels, paths, label, value, tips), tips


def _lines(panels: dict[str, list[BenchCell]], paths: list[str], label: str, value: Any, tips: Tips) -> Any:
    from matplotlib.ticker import NullLocator

    columns = min(_PANELS_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    # The legend below the panels has two columns.
    figure = new_figure(1.2 + 4.6 * columns, 0.6 + 3.4 * rows + 0.12 * len(paths))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    legend: dict[str, Any] = {}
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        for path in paths:
            points = sorted((cell.length or 0, value(cell)) for cell in panel if cell.path == path and value(cell))
            if points:
                legend[path] = _line(axis, points, path, paths.index(path), tips)
        lengths = sorted({cell.length or 0 for cell in panel})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [_short(length) for length in lengths])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("tokens of context")
        axis.set_title(title, fontsize=10)
        style_axis(axis, "both")
    set_log_y_scale(axes[0, 0])
    for row in axes:
        row[0].set_ylabel(label)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _dots(panels: dict[str, list[BenchCell]], paths: list[str], label: str, value: Any, tips: Tips) -> Any:
    """Plot a panel per shape, one below the other, with a row per path that shows its median and range."""
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = {title: [cell for cell in panel if value(cell)] for title, panel in panels.items()}
    heights = [0.8 + 0.3 * len(panel) for panel in shown.values()]
    figure = new_figure(8.0, 0.3 + sum(heights))
    axes = figure.subplots(len(shown), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axis, (title, panel) in zip(axes, shown.items(), strict=True):
        for place, cell in enumerate(panel):
            middle, low, high = value(cell)
            style = series_style(paths.index(cell.path))
            axis.plot([low, high], [place, place], color=style["color"], linewidth=1.4)
            axis.plot([middle], [place], color=style["color"], marker=style["marker"], markersize=6)
            add_tooltip(axis, tips, middle, place, f"{cell.path}: {middle:.4g} [{low:.4g}, {high:.4g}]")
        axis.set_yticks(range(len(panel)), [escape_dollars(cell.path) for cell in panel], fontsize=8.5)
        axis.set_ylim(len(panel) - 0.5, -0.5)
        axis.set_title(f"{title}, {_short(panel[0].length or 0)} tokens", fontsize=10)
        style_axis(axis, "x")
    axes[-1].set_xscale("log")
    axes[-1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[-1].xaxis.set_major_formatter("{x:g}")
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel(label)
    return figure


def _line(
    axis: Any, points: Sequence[tuple[int, tuple[float, float, float]]], path: str, number: int, tips: Tips
) -> Any:
    tip = "{}, {} tokens: {:.4g} [{:.4g}, {:.4g}]"
    intervals = [IntervalPoint(length, *value, tip.format(path, _short(length), *value)) for length, value in points]
    return draw_intervals(axis, intervals, number, tips)


def _panel(cell: BenchCell) -> str:
    """Return a workload's name without its length."""
    return ", ".join(part for part in cell.workload.split(", ") if not part.endswith(" tokens"))


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
