"""Findings of a sweep: sizes against KL, the smallest configuration with a small KL, and a sentence per task.

No torch here.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from diffquant.measure.cells import SweepPoint
from diffquant.measure.results import MISSING, POINTS, format_kl
from diffquant.measure.stats import Difference
from diffquant.measure.sweep.result import SweepResult
from diffquant.measure.tasks import task_class_named
from diffquant.reports.page import Drawing, Key
from diffquant.reports.plots import (
    IntervalPoint,
    Tips,
    draw_intervals,
    draw_panel,
    legend_entry,
    set_log_y_scale,
    style_axis,
)
from diffquant.reports.tables import Table

# The size that is shown for each target, with its unit.
_STORED = {"weights": "checkpoint, MB", "kv": "KV cache, kB per token", "k": "KV cache, kB per token"}
_STORED["v"] = _STORED["k"]
# Largest KL, in nats, of a recommended configuration: a choice of ours, shown wherever it is used.
SMALL_KL = 0.05


@dataclass(frozen=True)
class SizedPoint:
    """A configuration's size and its KL from 16 bits.

    Attributes:
        model: name of the model.
        task: name of the task that measured the KL.
        size: MB of its checkpoint, or kB per token of its KV cache.
        kl: mean KL in nats with its 95 % interval.
    """

    model: str
    point: SweepPoint
    task: str
    size: float
    kl: Difference

    @property
    def series(self) -> str:
        return f"{self.model}, {self.point.granularity}"

    @property
    def size_text(self) -> str:
        return f"{self.size:.1f} MB" if self.point.target == "weights" else f"{self.size:.2f} kB/token"

    @property
    def tooltip(self) -> str:
        text = f"{self.series}, {self.point.bits} bits: {self.size:.4g}, KL {self.kl.mean:.3g}"
        return f"{text} [{self.kl.low:.3g}, {self.kl.high:.3g}]"

    def command(self, path: str) -> str:
        """Return the command that makes this configuration; it rounds weights to nearest, as sweeps do."""
        target = self.point.target
        output = f"{self.model}-{target}{self.point.bits}"
        rounding = " --rounding nearest" if target == "weights" else ""
        scheme = f"--{target} {self.point.scheme_text}"
        return f"diffquant quantize {shlex.quote(path)} -o {shlex.quote(output)} {scheme}{rounding}"


def list_sizes(sweep: SweepResult) -> list[SizedPoint]:
    """List the configurations with quantized weights or caches whose KL was measured, in the table's order."""
    found = []
    for point, task in product(sweep.points, sweep.tasks):
        sizes, kl = sweep.find_any_result(point), kl_of(sweep, point, task)
        if sizes is None or kl is None or point.target not in _STORED:
            continue
        is_weights = point.target == "weights"
        size = (sizes.weight_bytes or 0) / 1e6 if is_weights else (sizes.kv_bytes or 0) / 1e3
        found.append(SizedPoint(sweep.names[point.model], point, task, size, kl))
    return found


def recommend_smallest(found: Sequence[SizedPoint], path_of: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """Recommend the smallest configuration with a small KL for each model, target and task.

    A KL is small if the upper end of its interval is below `SMALL_KL`. If no KL is small, 16 bits are recommended.

    Args:
        path_of: paths of the models that `quantize` can read, by name.

    Returns:
        A table with a row per recommendation, and the commands that make the recommended models, by title.
    """
    lines, commands = [], {}
    for model, target, task in dict.fromkeys((e.model, e.point.target, e.task) for e in found):
        mine = [e for e in found if (e.model, e.point.target, e.task) == (model, target, task)]
        small = [each for each in mine if each.kl.high < SMALL_KL]
        if not small:
            # No configuration below 16 bits is close enough.
            lines.append([model, target, task, "16", MISSING, MISSING])
            continue
        best = min(small, key=lambda each: (each.size, each.kl.mean))
        lines.append([model, target, task, best.point.scheme_text, best.size_text, format_kl(best.kl)])
        if model in path_of:
            commands[f"{model}, {target} {best.point.scheme_text}"] = best.command(path_of[model])
    return Table(["model", "target", "by", "take", "stored", "KL"], lines, names=4), commands


def draw_size_charts(found: Sequence[SizedPoint]) -> tuple[list[Drawing], list[Key]]:
    """Draw KL against size, in a chart per task and target with a line per model and granularity.

    Returns:
        The charts, and the entries of their common legend.
    """
    series = list(dict.fromkeys(each.series for each in found))
    drawings = []
    for task, target in dict.fromkeys((each.task, each.point.target) for each in found):
        mine = [each for each in found if (each.task, each.point.target) == (task, target)]
        title = f"{task}: {target}"
        drawings.append(draw_panel((4.6, 3.2), partial(_draw_sizes, mine, series), f"{title}, size against KL", title))
    return drawings, [legend_entry(number, name) for number, name in enumerate(series)]


def _draw_sizes(mine: Sequence[SizedPoint], series: Sequence[str], axis: Any, tips: Tips) -> None:
    for name in dict.fromkeys(each.series for each in mine):
        line = sorted((each for each in mine if each.series == name), key=lambda each: each.size)
        drawn = [(each, each.kl.plottable) for each in line]
        points = [IntervalPoint(each.size, kl.mean, kl.low, kl.high, each.tooltip) for each, kl in drawn]
        draw_intervals(axis, points, series.index(name), tips)
    if all(each.kl.plottable.low > 0 for each in mine):
        set_log_y_scale(axis)
    axis.set_xlabel(_STORED[mine[0].point.target])
    axis.set_ylabel("KL from 16 bits, nats")
    style_axis(axis)


def kl_of(sweep: SweepResult, point: SweepPoint, task: str) -> Difference | None:
    """Return a configuration's KL from 16 bits, or None if the task does not measure it."""
    metric = next((change for change in task_class_named(task).columns.change_metrics if change.is_log), None)
    return metric.estimate(*sweep.result_and_baseline(point, task)) if metric else None


# Loss in percentage points that an interval must exclude before "no measurable loss" is informative.
_SETTLED = 1.0


def summarize_findings(sweep: SweepResult) -> list[str]:
    """Summarize a sweep in a sentence or two per task; failures first."""
    sentences = [f"{len(sweep.failed_cells)} of {len(sweep.cells)} cells failed."] if sweep.failed_cells else []
    for task in sweep.tasks:
        changes = _leading_changes(sweep, task)
        if changes:
            tell = _summarize_items if task_class_named(task).columns.by_item else _summarize_text
            sentences.append(f"{task}: {tell(sweep, task, changes)}")
    return sentences or ["Nothing here is compared with 16 bits."]


def _leading_changes(sweep: SweepResult, task: str) -> list[tuple[SweepPoint, Difference]]:
    """Return changes from 16 bits by the first measure with data; in tasks scored by item, it must have a sign."""
    columns = task_class_named(task).columns
    for change in columns.change_metrics:
        if columns.by_item and change.is_log:
            continue
        measured = [(point, change.estimate(*sweep.result_and_baseline(point, task))) for point in sweep.points]
        if changes := [(point, drawn) for point, drawn in measured if drawn is not None]:
            return changes
    return []


def _summarize_items(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str:
    if all(math.isinf(drawn.low) for _, drawn in changes):
        return "one item cannot show a loss."
    worst, _ = min(changes, key=lambda change: change[1].mean)
    lower = [point.bits for point, drawn in changes if drawn.high < 0]
    of_all = f"of {len(changes)} configurations"
    if not lower:
        return _explain_resolution(sweep, task, changes) or (
            f"no measurable loss in any {of_all}, and a loss of {_SETTLED:.0f} point is ruled out; the lowest is "
            f"{_describe(sweep, worst, task)}."
        )
    told = f"{len(lower)} {of_all} lose; the largest loss is that of {_describe(sweep, worst, task)}."
    safe = min((point.bits for point, _ in changes if point.bits > max(lower)), default=None)
    return told if safe is None else f"{told} From {safe} bits up no loss is measurable."


def _explain_resolution(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str | None:
    """State which loss too few items cannot show, and what KL shows; return None if the items suffice."""
    points = [drawn for point, _ in changes if (drawn := POINTS.estimate(*sweep.result_and_baseline(point, task)))]
    if all(drawn.low >= -_SETTLED for drawn in points):
        return None
    widest = max((drawn.high - drawn.low) / 2 for drawn in points)
    items = max(
        len(result.values or ()) for point, _ in changes for result in sweep.result_and_baseline(point, task) if result
    )
    text = f"{items} items cannot show a loss below {widest:.0f} points; "
    measured = [(point, kl) for point, _ in changes if (kl := kl_of(sweep, point, task)) and kl.low > 0]
    if not measured:
        return f"{text}use more items, or KL."
    most = max(measured, key=lambda each: each[1].mean)[0]
    return (
        f"{text}KL shows a change in {len(measured)} of {len(changes)} configurations, the largest in "
        f"{_describe(sweep, most, task)}."
    )


def _summarize_text(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str:
    # A change in nats has a sign, and a large gain is a large change.
    ordered = sorted(changes, key=lambda change: abs(change[1].mean))
    least, most = (_describe(sweep, point, task) for point, _ in (ordered[0], ordered[-1]))
    return f"{most}." if len(ordered) == 1 else f"the smallest change is that of {least}; the largest that of {most}."


def _describe(sweep: SweepResult, point: SweepPoint, task: str) -> str:
    """Return a configuration's name and all of its measured changes, in words."""
    known = [
        (change.words, change.estimate(*sweep.result_and_baseline(point, task)))
        for change in task_class_named(task).columns.change_metrics
    ]
    texts = [words(drawn) for words, drawn in known if words and drawn]
    return ", ".join([f"{sweep.names[point.model]} at {point.label}", *texts])
