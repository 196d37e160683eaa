"""Plots of latency, speed and memory over context length, a panel per shape; readable in print and without colours."""

from collections.abc import Sequence
from typing import Any

from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.reports.plots import IntervalPoint, Tips, draw_intervals, new_figure, set_log_y_scale, style_axis

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
    from matplotlib.ticker import NullLocator

    panels: dict[str, list[BenchCell]] = {}
    for cell in cells:
        panels.setdefault(_panel(cell), []).append(cell)
    paths, tips = list(dict.fromkeys(cell.path for cell in cells)), list[str]()
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
    return figure, tips


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
