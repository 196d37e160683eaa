"""Findings of a sweep, in a sentence or two per task. No torch here."""

import math
from collections.abc import Sequence

from diffquant.measure.cells import SweepPoint
from diffquant.measure.results import POINTS
from diffquant.measure.stats import Difference
from diffquant.measure.sweep.result import SweepResult
from diffquant.measure.tasks import task_class_named

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
    measured = [(point, kl) for point, _ in changes if (kl := _kl(sweep, point, task)) and kl.low > 0]
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


def _kl(sweep: SweepResult, point: SweepPoint, task: str) -> Difference | None:
    """Return a configuration's KL from 16 bits, or None if the task does not measure it."""
    metric = next((change for change in task_class_named(task).columns.change_metrics if change.is_log), None)
    return metric.estimate(*sweep.result_and_baseline(point, task)) if metric else None
