"""A plot of results against bits: a row of panels a task, a panel for each thing that is quantized, a line a model.

Source: the presentation follows figure 8 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from diffquant.errors import UsageError
from diffquant.evals.columns import Drawn
from diffquant.evals.tasks import kind_of
from diffquant.report.plots import COLOURS, MARKERS, as_svg, literal, new_figure, plain_log_scale, tidy
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import rows, tasks_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure

TITLES = {"logits": "attention logits", "kv": "KV cache", "k": "keys", "v": "values"}
# Distance between two lines at one width, in units of the axis; panels side by side.
_SPREAD, _COLUMNS = 0.08, 6
# Where a logarithmic axis ends, as a share of the lowest point: an interval that holds 0 would have no end.
_FLOOR = 0.5


def panel_title(point: Point) -> str:
    """What a point quantizes, such as "attention logits, per row"."""
    title = TITLES.get(point.target, point.target)
    if point.target in (EXPORTED, RECIPE):
        return title
    return f"{title}, {'static' if point.granularity == 'static' else f'per {point.granularity}'}"


@dataclass(frozen=True)
class BitsLine:
    """One model in one panel: what is drawn at each width, from wide to narrow."""

    model: str
    points: tuple[tuple[int, Drawn], ...]


def plot(sweep: SweepResult, path: Path) -> None:
    """Draw a sweep into a file, whose suffix (.png, .svg, .pdf) says the format.

    Raises:
        UsageError: the sweep has nothing to draw.
    """
    _figure(sweep).savefig(path, dpi=200)


def svg(sweep: SweepResult) -> str:
    """The plot as one <svg> element that refers to nothing outside itself.

    Raises:
        UsageError: the sweep has nothing to draw.
    """
    return as_svg(_figure(sweep))


def panels(sweep: SweepResult, task: str) -> dict[str, list[BitsLine]]:
    """A task's lines by their panel's title; what failed, and a task that has nothing to draw of it, is left out."""
    drawn: dict[tuple[str, str], list[tuple[int, Drawn]]] = {}
    at_16: dict[str, list[tuple[int, Drawn]]] = {}
    for row in rows(sweep):
        compared = row.results[task]
        value = kind_of(task).columns.drawn(compared) if compared.result else None
        if value is not None and row.point.is_baseline:
            at_16[row.model] = [(16, value)]
        elif value is not None and row.point.target not in (EXPORTED, RECIPE):
            drawn.setdefault((panel_title(row.point), row.model), []).append((row.point.bits, value))
    lines: dict[str, list[BitsLine]] = {}
    for (title, model), narrow in drawn.items():
        lines.setdefault(title, []).append(BitsLine(model, tuple(at_16.get(model, []) + narrow)))
    return lines


def _figure(sweep: SweepResult) -> "Figure":
    panels_by_task = {task: found for task in tasks_of(sweep) if (found := panels(sweep, task))}
    if not panels_by_task:
        raise UsageError("nothing to plot: no quantized cell was measured")
    titles = list(dict.fromkeys(title for found in panels_by_task.values() for title in found))
    models = list(
        dict.fromkeys(line.model for found in panels_by_task.values() for ls in found.values() for line in ls)
    )
    columns = min(len(titles), _COLUMNS)
    bands = -(-len(titles) // columns)
    figure: Figure = new_figure(1.0 + (4.6 if columns < 3 else 2.7) * columns, 0.8 + 3.2 * bands * len(panels_by_task))
    grid = figure.subplots(bands * len(panels_by_task), columns, squeeze=False)
    legend: dict[str, ErrorbarContainer] = {}
    for number, (task, found) in enumerate(panels_by_task.items()):
        axes = list(grid[number * bands : (number + 1) * bands].flat)
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(title, fontsize=10)
            legend |= _draw(axis, found.get(title, []), models)
        for axis in axes[len(titles) :]:
            axis.set_visible(False)
        _scale(axes[: len(titles)], found, kind_of(task).columns.is_log)
        for axis in axes[::columns]:
            axis.set_ylabel(_axis_label(sweep, task), fontsize=9)
    # matplotlib's legend takes containers too, which its annotations leave out.
    handles = cast("list[Artist]", list(legend.values()))
    figure.legend(handles, list(map(literal, legend)), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw(axis: "Axes", lines: Sequence[BitsLine], models: list[str]) -> "dict[str, ErrorbarContainer]":
    """Draw one panel; returns what the legend shows of each model."""
    widths = sorted({bits for line in lines for bits, _ in line.points}, reverse=True)
    drawn: dict[str, ErrorbarContainer] = {}
    for line in lines:
        number = models.index(line.model)
        # Side by side, so that bars at one width stay readable.
        shift = _SPREAD * (number - (len(models) - 1) / 2)
        values = [value for _, value in line.points]
        drawn[line.model] = axis.errorbar(
            [widths.index(bits) + shift for bits, _ in line.points],
            [value.value for value in values],
            yerr=[[v.value - v.low for v in values], [v.high - v.value for v in values]],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2.5,
        )
    axis.set_xticks(range(len(widths)), [str(bits) for bits in widths])
    axis.set_xlabel("bits of a code")
    tidy(axis)
    return drawn


def _scale(axes: "Sequence[Axes]", found: dict[str, list[BitsLine]], is_log: bool) -> None:
    """Give all panels of a task one scale: logarithmic, or from 0 where nothing lies below."""
    values = [value for lines in found.values() for line in lines for _, value in line.points]
    lowest, highest = min(value.value for value in values), max(value.high for value in values)
    is_log = is_log and lowest > 0
    bottom = _FLOOR * lowest if is_log else min(0.0, *(value.low for value in values))
    for axis in axes:
        axis.set_ylim(bottom, highest * (1 / _FLOOR if is_log else 1.04))
        if is_log:
            plain_log_scale(axis)


def _axis_label(sweep: SweepResult, task: str) -> str:
    result = next(cell.result for cell in sweep.cells if cell.task == task and cell.result)
    return kind_of(task).columns.label(task, result)
