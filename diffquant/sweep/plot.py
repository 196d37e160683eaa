"""A plot of accuracy against bits, one line a model and granularity, one panel a target.

Source: the presentation follows figure 8 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from diffquant.errors import UsageError
from diffquant.evals.tasks import kind_of
from diffquant.report.plots import COLOURS, MARKERS, STYLES, as_svg, new_figure, tidy
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import Row, rows, tasks_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure

# Distance between two lines at one width, and between the outermost ones, in units of the axis.
_SPREAD, _SPREAD_OF_ALL = 0.06, 0.6
TITLES = {"logits": "attention logits", "kv": "KV cache", "k": "keys", "v": "values"}


def panel_title(point: Point) -> str:
    """What a point quantizes, such as "attention logits, per row"."""
    title = TITLES.get(point.target, point.target)
    return title if point.target in (EXPORTED, RECIPE) else f"{title}, per {point.granularity}"


@dataclass(frozen=True)
class BitsLine:
    """One model under one granularity: (bits, value, error) from wide to narrow, 16 bits first."""

    model: str
    granularity: str
    points: tuple[tuple[int, float, float], ...]


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


def lines(sweep: SweepResult, target: str) -> list[BitsLine]:
    """The lines of one target's panel; configurations that failed are left out."""
    measured = [(row, value) for row in rows(sweep) if (value := _drawn_value(row)) is not None]
    drawn: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for row, value in measured:
        if row.point.target == target:
            drawn.setdefault((row.model, row.point.granularity), []).append((row.point.bits, *value))
    at_16 = {row.model: value for row, value in measured if row.point.is_baseline}
    return [
        BitsLine(model, granularity, tuple([(16, *at_16[model])] if model in at_16 else []) + tuple(narrow))
        for (model, granularity), narrow in drawn.items()
    ]


def _figure(sweep: SweepResult) -> "Figure":
    swept = [t for t in dict.fromkeys(point.target for point in sweep.points) if t not in ("", EXPORTED, RECIPE)]
    targets = [t for t in swept if lines(sweep, t)]
    if not targets:
        raise UsageError("nothing to plot: no quantized cell was measured")
    panels = {target: lines(sweep, target) for target in targets}
    drawn = [line for panel in panels.values() for line in panel]
    look = _Look(
        list(dict.fromkeys(line.model for line in drawn)), list(dict.fromkeys(line.granularity for line in drawn))
    )
    figure: Figure = new_figure(2.4 + 4.4 * len(targets), 4.6)
    axes = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
    legend: dict[str, ErrorbarContainer] = {}
    for axis, target in zip(axes, targets, strict=True):
        legend |= _draw(axis, target, panels[target], look)
    axes[0].set_ylabel(_axis_label(sweep))
    columns = 1 if len(targets) == 1 and max(map(len, legend)) > 32 else 2
    # matplotlib's legend takes containers too, which its annotations leave out.
    handles = cast("list[Artist]", list(legend.values()))
    figure.legend(handles, list(legend), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.set_figheight(4.2 + 0.2 * -(-len(legend) // columns))
    return figure


class Style(TypedDict):
    """What tells a line apart from others, in matplotlib's names."""

    color: str
    linestyle: str
    marker: str


@dataclass(frozen=True)
class _Look:
    """A colour a model, a dash and marker a granularity, the same in every panel."""

    models: list[str]
    granularities: list[str]

    def of(self, line: BitsLine) -> Style:
        style = self.granularities.index(line.granularity)
        return {
            "color": COLOURS[self.models.index(line.model) % len(COLOURS)],
            "linestyle": STYLES[style % len(STYLES)],
            "marker": MARKERS[style % len(MARKERS)],
        }


def _draw(axis: "Axes", target: str, panel: Sequence[BitsLine], look: _Look) -> "dict[str, ErrorbarContainer]":
    """Draw one panel; returns what the legend shows of each line."""
    widths = sorted({bits for line in panel for bits, _, _ in line.points}, reverse=True)
    drawn: dict[str, ErrorbarContainer] = {}
    for number, line in enumerate(panel):
        # Side by side, so that error bars at one width stay readable.
        shift = min(_SPREAD, _SPREAD_OF_ALL / len(panel)) * (number - (len(panel) - 1) / 2)
        drawn[f"{line.model}, per {line.granularity}"] = axis.errorbar(
            [widths.index(bits) + shift for bits, _, _ in line.points],
            [value for _, value, _ in line.points],
            yerr=[error for _, _, error in line.points],
            **look.of(line),
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2.5,
        )
    axis.set_xticks(range(len(widths)), [str(bits) for bits in widths])
    axis.set_xlabel("bits of a code")
    axis.set_title(TITLES.get(target, target), fontsize=11)
    tidy(axis)
    return drawn


def _drawn_value(row: Row) -> tuple[float, float] | None:
    """The value and standard error that are drawn of a row: those of the table's first task."""
    task, compared = next(iter(row.results.items()))
    return kind_of(task).columns.drawn(compared.result) if compared.result else None


def _axis_label(sweep: SweepResult) -> str:
    task = tasks_of(sweep)[0]
    result = next(cell.result for cell in sweep.cells if cell.task == task and cell.result)
    return kind_of(task).columns.label(task, result)
