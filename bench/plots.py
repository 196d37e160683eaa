"""Plots of latency, speed and memory against length, a panel for each shape, legible in print and without colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.bench.cells import BenchCell, BenchResult
from diffquant.report.plots import COLOURS, STYLES, as_svg, new_figure, tidy

# Black first: a baseline comes first.
_COLOURS = (COLOURS[-1], *COLOURS[:-1])
_MARKERS = ("o", "s", "^", "D", "v")
_PANELS_A_ROW = 2


@dataclass(frozen=True)
class Plot:
    """A drawing of some cells; its name says section and quantity."""

    name: str
    title: str
    figure: Any

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.name}.png"
        self.figure.savefig(path, dpi=200)
        return path

    def svg(self) -> str:
        """One <svg> element that refers to nothing outside itself."""
        return as_svg(self.figure)


def plots(result: BenchResult) -> list[Plot]:
    """Plots of every section whose cells have lengths."""
    drawn = []
    for section in dict.fromkeys(cell.section for cell in result.cells):
        cells = [cell for cell in result.cells if cell.section == section and cell.values and cell.length]
        if not cells:
            continue
        speed = cells[0].unit == "tokens/s"
        what = "tokens a second" if speed else "milliseconds a call"
        drawn.append(Plot(f"{section}-time", f"{section}: {what}", _figure(cells, what, _time)))
        if any(cell.peak_bytes for cell in cells):
            label = "peak memory beyond the inputs, MB"
            drawn.append(Plot(f"{section}-memory", f"{section}: {label}", _figure(cells, label, _megabytes)))
    return drawn


def _time(cell: BenchCell) -> tuple[float, float, float] | None:
    spread = cell.spread
    return None if spread is None else (spread.median, spread.low, spread.high)


def _megabytes(cell: BenchCell) -> tuple[float, float, float] | None:
    if not cell.peak_bytes:  # a logarithmic axis has no zero
        return None
    value = cell.peak_bytes / 1e6
    return value, value, value


def _figure(cells: Sequence[BenchCell], label: str, value: Any) -> Any:
    from matplotlib.ticker import NullLocator

    panels: dict[str, list[BenchCell]] = {}
    for cell in cells:
        panels.setdefault(_panel(cell), []).append(cell)
    paths = list(dict.fromkeys(cell.path for cell in cells))
    columns = min(_PANELS_A_ROW, len(panels))
    rows = -(-len(panels) // columns)
    # The legend below the panels has two paths on a line.
    figure = new_figure(1.2 + 4.6 * columns, 0.6 + 3.4 * rows + 0.12 * len(paths))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    legend: dict[str, Any] = {}
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        for path in paths:
            points = sorted((cell.length or 0, value(cell)) for cell in panel if cell.path == path and value(cell))
            if points:
                legend[path] = _line(axis, points, paths.index(path))
        lengths = sorted({cell.length or 0 for cell in panel})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [_short(length) for length in lengths])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("tokens of context")
        axis.set_title(title, fontsize=10)
        tidy(axis, "both")
    for row in axes:
        row[0].set_ylabel(label)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _line(axis: Any, points: Sequence[tuple[int, tuple[float, float, float]]], number: int) -> Any:
    middle = [value[0] for _, value in points]
    return axis.errorbar(
        [length for length, _ in points],
        middle,
        yerr=[[value[0] - value[1] for _, value in points], [value[2] - value[0] for _, value in points]],
        color=_COLOURS[number % len(_COLOURS)],
        linestyle=STYLES[number % len(STYLES)],
        marker=_MARKERS[number % len(_MARKERS)],
        markersize=5,
        linewidth=1.4,
        elinewidth=1,
        capsize=2,
    )


def _panel(cell: BenchCell) -> str:
    """A workload's name without its length."""
    return ", ".join(part for part in cell.workload.split(", ") if not part.endswith(" tokens"))


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
