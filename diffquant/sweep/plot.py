"""A plot of results against bits: for each task the change from 16 bits, and below it the scores.

Each panel shows one target at one granularity, with a line per model; of one model alone, a panel shows a target with a
line per granularity.

Source: the presentation follows figure 8 of arXiv 2410.05258.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from diffquant.errors import UsageError
from diffquant.evals.columns import Metric
from diffquant.evals.stats import Difference
from diffquant.evals.tasks import kind_of
from diffquant.report.page import Drawing
from diffquant.report.plots import REFERENCE, Tips, as_svg, literal, look, new_figure, plain_log_scale, tidy
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import rows, tasks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "logits": "attention logits",
    "kv": "KV cache",
    "k": "keys",
    "v": "values",
    "qk": "queries and keys",
    "p": "softmax weights",
    "pv": "values before P·V",
}
# Distance in bits between two models at one width; panels side by side.
_SPREAD, _COLUMNS = 0.12, 5
# Lower end of a logarithmic axis, as a share of the lowest point: an interval that reaches 0 has no end on it.
_FLOOR = 0.5
# Inches: a panel with its labels, and a band of scores below one of changes.
_WIDE, _NARROW, _TALL, _LOW = 4.6, 3.0, 3.0, 2.3


def panel_title(point: Point) -> str:
    """Title of a point's panel, such as "attention logits, per row with shift"."""
    title = TITLES.get(point.target, point.target)
    if point.target in (EXPORTED, RECIPE):
        return title
    return f"{title}, {_granularity(point)}"


def _granularity(point: Point) -> str:
    """Name the granularity of a scale, such as "per row with shift" or "per group of 32"."""
    if point.granularity == "static":
        return "static"
    shared, _, form = point.granularity.partition(":")
    shared = f"group of {shared[1:]}" if shared[:1] == "g" and shared[1:].isdigit() else shared
    return f"per {shared}" + ({"": "", "rotated": ", rotated"}.get(form, f" with {form}"))


@dataclass(frozen=True)
class BitsLine:
    """One model in one panel, or one granularity of the model there is.

    Attributes:
        model: name of the model, or of the granularity.
        points: values at each width, from wide to narrow.
        full: value at 16 bits, or None for a change, which is zero there.
    """

    model: str
    points: tuple[tuple[int, Difference], ...]
    full: Difference | None = None


@dataclass(frozen=True)
class Band:
    """A row of panels for one task, which share an axis.

    Attributes:
        label: text of the axis.
        is_change: whether changes from 16 bits are drawn instead of scores.
        is_log: whether the axis is logarithmic.
        lines: lines by the title of their panel.
    """

    task: str
    label: str
    is_change: bool
    is_log: bool
    lines: dict[str, list[BitsLine]]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(line.model for lines in self.lines.values() for line in lines))


def bands(sweep: SweepResult) -> list[Band]:
    """Every band to draw, in the table's order of tasks; failed cells are left out."""
    found = [
        band
        for task in tasks_of(sweep)
        for band in (
            *(_band(sweep, task, change, is_change=True) for change in kind_of(task).columns.changes),
            *(_band(sweep, task, score, is_change=False) for score in [kind_of(task).columns.score] if score),
        )
    ]
    return [band for band in found if band.lines]


def plot(sweep: SweepResult, path: Path | BinaryIO) -> None:
    """Draw a sweep into a file, whose suffix (.png, .svg, .pdf) says the format, or as PNG into a stream.

    Raises:
        UsageError: the sweep has nothing to draw.
    """
    drawn = bands(sweep)
    if not drawn:
        raise UsageError("nothing to plot: no quantized cell was measured")
    _figure(drawn).savefig(path, dpi=160)


def charts(band: Band, models: Sequence[str]) -> list[Drawing]:
    """Each panel of a band as its own drawing, with tooltips for its values.

    Args:
        models: all models of the page, so that each has the same look in every chart.
    """
    found = []
    for title, lines in band.lines.items():
        figure, tips = new_figure(_WIDE, _TALL if band.is_change else _LOW), Tips()
        axis = figure.subplots()
        _draw(axis, lines, models, band, tips)
        axis.set_ylabel(band.label)
        found.append(Drawing(as_svg(figure, f"{band.task}, {title}: {band.label}", tips), title))
    return found


def bars_text(drawn: Sequence[Band]) -> str:
    """A sentence that explains the bars and dashed lines."""
    if all(band.is_change for band in drawn):
        return "bars: 95 % intervals"
    return "bars: 95 % intervals, of differences paired over the same items; dashed: 16 bits"


def _band(sweep: SweepResult, task: str, metric: Metric, is_change: bool) -> Band:
    return Band(task, metric.label, is_change, metric.is_log, _lines(sweep, task, metric, is_change))


def _lines(sweep: SweepResult, task: str, metric: Metric, is_change: bool) -> dict[str, list[BitsLine]]:
    """A task's lines by the title of their panel; changes have no value at 16 bits."""
    full: dict[str, Difference | None] = {}
    shared = _granularities(sweep)
    drawn: dict[tuple[str, str], list[tuple[int, Difference]]] = {}
    for row in rows(sweep):
        compared = row.results[task]
        found = metric.of(compared) if compared.result else None
        value = found.drawn if found else None
        if row.point.is_baseline:
            full[row.model] = value
        elif value is not None and row.point.target not in (EXPORTED, RECIPE):
            title, line = panel_title(row.point), row.model
            if len(shared.get(row.point.target, ())) > 1:
                title, line = TITLES.get(row.point.target, row.point.target), _granularity(row.point)
            drawn.setdefault((title, line), []).append((row.point.bits, value))
    alone = next(iter(full.values()), None)
    lines: dict[str, list[BitsLine]] = {}
    for (title, line), narrow in drawn.items():
        # The line at 16 bits is drawn once, also where granularities share it.
        at_16 = full.get(line) if line in full else alone if title not in lines else None
        lines.setdefault(title, []).append(BitsLine(line, tuple(narrow), None if is_change else at_16))
    return lines


def _granularities(sweep: SweepResult) -> dict[str, set[str]]:
    """The granularities of each target in a sweep of one model; none of a sweep that compares models."""
    found: dict[str, set[str]] = {}
    if len({point.model for point in sweep.points}) == 1:
        for point in sweep.points:
            found.setdefault(point.target, set()).add(point.granularity)
    return found


def _figure(drawn: list[Band]) -> "Figure":
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
        axes[0].set_ylabel(f"{band.task}\n{band.label}", fontsize=9)
    handles = [_handle(number, model) for number, model in enumerate(models)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(bars_text(drawn), fontsize=9)
    return figure


def _strips(drawn: list[Band], titles: list[str], columns: int) -> "Iterator[tuple[Band, list[str]]]":
    """Rows of panels, `columns` titles at a time, a task's changes above its scores."""
    for task in dict.fromkeys(band.task for band in drawn):
        for first in range(0, len(titles), columns):
            for band in drawn:
                if band.task == task:
                    yield band, titles[first : first + columns]


def _handle(number: int, model: str) -> "object":
    from matplotlib.lines import Line2D

    return Line2D([], [], markersize=5, linewidth=1.6, label=literal(model), **look(number))


def _draw(axis: "Axes", lines: Sequence[BitsLine], models: Sequence[str], band: Band, tips: Tips | None = None) -> None:
    """Draw one panel on its band's common scale."""
    widths = sorted({bits for line in lines for bits, _ in line.points}, reverse=True)
    for line in lines:
        number = models.index(line.model)
        style = look(number)
        # Side by side, so that bars at one width stay readable.
        shift = _SPREAD * (number - (len(models) - 1) / 2)
        places, values = [bits - shift for bits, _ in line.points], [value for _, value in line.points]
        bars = [[v.mean - v.low for v in values], [v.high - v.mean for v in values]]
        heights = [value.mean for value in values]
        axis.errorbar(
            places,
            heights,
            bars,
            markersize=5,
            linewidth=1.4,
            elinewidth=1,
            capsize=2.5,
            **style,
        )
        if tips:
            for place, (bits, value) in zip(places, line.points, strict=True):
                tips.mark(axis, place, value.mean, _tip(line.model, bits, value))
        if line.full is not None:
            axis.axhline(line.full.mean, color=style["color"], linestyle=(number * 3, (3, 6)), linewidth=0.9)
    axis.set_xticks(widths, [str(bits) for bits in widths])
    if widths:
        axis.set_xlim(max(widths) + 0.5, min(widths) - 0.5)
    axis.set_xlabel("bits")
    if band.is_change and not band.is_log:
        axis.axhline(0, color=REFERENCE, linewidth=1.2, zorder=1)
    tidy(axis)
    _scale(axis, band)


def _scale(axis: "Axes", band: Band) -> None:
    """Give a panel its band's scale: logarithmic, around 0 for changes, from 0 on for scores."""
    lines = [line for found in band.lines.values() for line in found]
    values = [value for line in lines for value in (*(v for _, v in line.points), *([line.full] if line.full else []))]
    lowest, highest = min(value.mean for value in values), max(value.high for value in values)
    if band.is_log and lowest > 0:
        axis.set_ylim(_FLOOR * lowest, highest / _FLOOR)
        plain_log_scale(axis)
        return
    bottom, top = min(0.0, *(value.low for value in values)), max(0.0, highest)
    margin = 0.05 * (top - bottom) or 1.0
    axis.set_ylim(bottom - (margin if bottom < 0 else 0), top + margin)


def _tip(model: str, bits: int, value: Difference) -> str:
    bounds = f" [{value.low:.3g}, {value.high:.3g}]" if value.low < value.high else ""
    return f"{model}, {bits} bits: {value.mean:.3g}{bounds}"
