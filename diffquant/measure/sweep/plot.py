"""A plot of results against bits: for each task the change from 16 bits, and below it the scores.

Each panel shows one target at one granularity, with a line per model. In a sweep of a single model, a panel shows one
target with a line per granularity.

Source: the presentation follows figure 8 of arXiv 2410.05258.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from diffquant.errors import UsageError
from diffquant.measure.cells import EXPORTED, RECIPE, SweepPoint
from diffquant.measure.results import Metric, TaskResult
from diffquant.measure.tasks import task_class_named
from diffquant.reports.page import Drawing
from diffquant.reports.plots import (
    REFERENCE,
    IntervalPoint,
    PlotLine,
    Tips,
    draw_intervals,
    draw_panel,
    escape_dollars,
    new_figure,
    series_style,
    set_log_y_scale,
    style_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Horizontal distance in bits between two models at one width; largest number of panels in a row.
_SPREAD, _COLUMNS = 0.12, 5
# Title of the one panel of a task whose values are the same in every panel.
_ALL = "every target (equal results)"
# Lower end of a logarithmic axis, as a fraction of the lowest point, since the axis cannot show an interval down to 0.
_FLOOR = 0.5
# Sizes in inches: width of a panel with up to two and with more columns, height of a band of changes and of scores.
_WIDE, _NARROW, _TALL, _LOW = 4.6, 3.0, 3.0, 2.3


class PlottableSweep(Protocol):
    """The part of a `SweepResult` that plots read."""

    @property
    def points(self) -> list[SweepPoint]: ...
    @property
    def names(self) -> dict[Path, str]: ...
    @property
    def tasks(self) -> list[str]: ...
    def result_and_baseline(self, point: SweepPoint, task: str) -> tuple[TaskResult | None, TaskResult | None]: ...


@dataclass(frozen=True)
class TaskPanels:
    """A row of panels for one task, which share an axis.

    Attributes:
        metric: number that is drawn.
        lines: lines of each panel, by its title.
    """

    task: str
    metric: Metric
    lines: dict[str, list[PlotLine]]

    @property
    def is_change(self) -> bool:
        """Whether changes from 16 bits are drawn instead of scores."""
        return self.metric.words is not None

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(line.model for lines in self.lines.values() for line in lines))


def list_panel_rows(sweep: PlottableSweep) -> list[TaskPanels]:
    """List every row of panels to draw, in the table's order of tasks; failed cells are left out."""
    found = [
        TaskPanels(task, metric, _lines(sweep, task, metric))
        for task in sweep.tasks
        for metric in task_class_named(task).columns.plotted_metrics
    ]
    found = [band for band in found if band.lines]
    same = {task for task in sweep.tasks if all(_is_same(band) for band in found if band.task == task)}
    return [_join_panels(band) if band.task in same else band for band in found]


def _is_same(band: TaskPanels) -> bool:
    """Return whether several panels show the same value and interval of each model at every width."""
    values = {(line.model, *point[1:4]) for lines in band.lines.values() for line in lines for point in line.points}
    return len(band.lines) > 1 and len(values) == len(band.models)


def _join_panels(band: TaskPanels) -> TaskPanels:
    """Join panels that show the same values into one with a line per model."""
    joined: list[PlotLine] = []
    for model in band.models:
        lines = [line for lines in band.lines.values() for line in lines if line.model == model]
        points = {point.x: point for line in lines for point in line.points}
        full = next((line.full for line in lines if line.full), None)
        joined.append(PlotLine(model, tuple(points[x] for x in sorted(points, reverse=True)), full=full))
    return replace(band, lines={_ALL: joined})


def plot(sweep: PlottableSweep, path: Path | BinaryIO) -> None:
    """Draw a sweep into a file, whose suffix (.png, .svg, .pdf) determines the format, or as PNG into a stream.

    Raises:
        UsageError: the sweep has nothing to draw.
    """
    drawn = list_panel_rows(sweep)
    if not drawn:
        raise UsageError("nothing to plot: no quantized cell was measured")
    _figure(drawn).savefig(path, dpi=160)


def draw_panels(panel_row: TaskPanels, models: Sequence[str]) -> list[Drawing]:
    """Draw each panel of a row as a separate picture, with tooltips for its values.

    Args:
        models: names of all models on the page, which determine each model's colour and marker.
    """
    found = []
    for title, lines in panel_row.lines.items():
        size = _WIDE, _TALL if panel_row.is_change else _LOW
        name = f"{panel_row.task}, {title}: {panel_row.metric.label}"
        found.append(draw_panel(size, partial(_draw_named, lines, models, panel_row), name, title))
    return found


def _draw_named(lines: Sequence[PlotLine], models: Sequence[str], band: TaskPanels, axis: "Axes", tips: Tips) -> None:
    _draw(axis, lines, models, band, tips)
    axis.set_ylabel(band.metric.label)


def explain_bars(panel_rows: Sequence[TaskPanels]) -> str:
    """Return a line of text that explains the error bars and dashed lines."""
    if all(band.is_change for band in panel_rows):
        return "bars: 95 % intervals"
    return "bars: 95 % intervals, of differences paired over the same items; dashed: 16 bits"


def _lines(sweep: PlottableSweep, task: str, metric: Metric) -> dict[str, list[PlotLine]]:
    """Return a task's lines by the title of their panel; changes have no value at 16 bits."""
    full: dict[str, IntervalPoint | None] = {}
    shared = _granularities(sweep)
    drawn: dict[tuple[str, str], list[IntervalPoint]] = {}
    for point in sweep.points:
        found = metric.estimate(*sweep.result_and_baseline(point, task))
        model, change = sweep.names[point.model], found.plottable if found else None
        value = IntervalPoint(point.bits, change.mean, change.low, change.high) if change else None
        if point.is_baseline:
            full[model] = value
        elif value is not None and point.target not in (EXPORTED, RECIPE):
            is_shared = len(shared.get(point.target, ())) > 1
            title, line = (point.title, point.granularity_words) if is_shared else (point.panel, model)
            drawn.setdefault((title, line), []).append(value)
    alone = next(iter(full.values()), None)
    lines: dict[str, list[PlotLine]] = {}
    for (title, line), narrow in drawn.items():
        # The line at 16 bits is drawn once, also where granularities share it.
        at_16 = full.get(line) if line in full else alone if title not in lines else None
        lines.setdefault(title, []).append(PlotLine(line, tuple(narrow), full=None if metric.words else at_16))
    return lines


def _granularities(sweep: PlottableSweep) -> dict[str, set[str]]:
    """Return the granularities of each target in a sweep of one model; empty for a sweep of several models."""
    found: dict[str, set[str]] = {}
    if len({point.model for point in sweep.points}) == 1:
        for point in sweep.points:
            found.setdefault(point.target, set()).add(point.granularity)
    return found


def _figure(drawn: list[TaskPanels]) -> "Figure":
    titles = list(dict.fromkeys(title for band in drawn for title in band.lines))
    models = list(dict.fromkeys(model for band in drawn for model in band.models))
    # Spread the panels over the rows as evenly as possible.
    columns = -(-len(titles) // -(-len(titles) // _COLUMNS))
    strips = list(_strips(drawn, titles, columns))
    heights = [_TALL if band.is_change else _LOW for band, _ in strips]
    figure: Figure = new_figure(0.8 + (_WIDE if columns < 3 else _NARROW) * columns, 0.6 + sum(heights))
    grid = figure.subplots(len(strips), columns, squeeze=False, height_ratios=heights)
    above: list[str] = []
    for axes, (band, shown) in zip(grid, strips, strict=True):
        for axis, title in zip(axes, shown, strict=False):
            _draw(axis, band.lines.get(title, []), models, band)
            axis.set_title("" if shown == above else title, fontsize=10)
            axis.set_xlabel("bits" if band is drawn[-1] else "")
        above = shown
        for axis in axes[len(shown) :]:
            axis.set_visible(False)
        axes[0].set_ylabel(f"{band.task}\n{band.metric.label}", fontsize=9)
    handles = [_handle(number, model) for number, model in enumerate(models)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(explain_bars(drawn), fontsize=9)
    return figure


def _strips(drawn: list[TaskPanels], titles: list[str], columns: int) -> "Iterator[tuple[TaskPanels, list[str]]]":
    """Yield rows of panels, `columns` titles at a time, a task's changes above its scores."""
    for task in dict.fromkeys(band.task for band in drawn):
        mine = [band for band in drawn if band.task == task]
        shown = [title for title in titles if any(title in band.lines for band in mine)]
        for first in range(0, len(shown), columns):
            for band in mine:
                yield band, shown[first : first + columns]


def _handle(number: int, model: str) -> "object":
    from matplotlib.lines import Line2D

    return Line2D([], [], markersize=5, linewidth=1.6, label=escape_dollars(model), **series_style(number))


def _draw(
    axis: "Axes", lines: Sequence[PlotLine], models: Sequence[str], band: TaskPanels, tips: Tips | None = None
) -> None:
    """Draw one panel on its band's common scale."""
    widths = sorted({point.x for line in lines for point in line.points}, reverse=True)
    for line in lines:
        number = models.index(line.model)
        # Side by side, so that bars at one width stay readable.
        shift = _SPREAD * (number - (len(models) - 1) / 2)
        points = [point._replace(x=point.x - shift, tip=_tip(line.model, point)) for point in line.points]
        draw_intervals(axis, points, number, tips)
        if line.full is not None:
            axis.axhline(
                line.full.y, color=series_style(number)["color"], linestyle=(number * 3, (3, 6)), linewidth=0.9
            )
    axis.set_xticks(widths, [f"{bits:g}" for bits in widths])
    if widths:
        axis.set_xlim(max(widths) + 0.5, min(widths) - 0.5)
    axis.set_xlabel("bits")
    if band.is_change and not band.metric.is_log:
        axis.axhline(0, color=REFERENCE, linewidth=1.2, zorder=1)
    style_axis(axis)
    _scale(axis, band)


def _scale(axis: "Axes", band: TaskPanels) -> None:
    """Give a panel its band's scale: logarithmic, or linear and including 0 if changes are drawn."""
    lines = [line for found in band.lines.values() for line in found]
    values = [value for line in lines for value in (*line.points, line.full) if value]
    lowest, highest = min(value.y for value in values), max(value.high for value in values)
    if band.metric.is_log and lowest > 0:
        axis.set_ylim(_FLOOR * lowest, highest / _FLOOR)
        set_log_y_scale(axis)
        return
    bounds = [value.low for value in values] + [highest] + ([0.0] if band.is_change else [])
    margin = 0.05 * (max(bounds) - min(bounds)) or 1.0
    axis.set_ylim(min(bounds) - margin, max(bounds) + margin)


def _tip(model: str, point: IntervalPoint) -> str:
    bounds = f" [{point.low:.3g}, {point.high:.3g}]" if point.low < point.high else ""
    return f"{model}, {point.x:g} bits: {point.y:.3g}{bounds}"
