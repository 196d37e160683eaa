"""The sentences that say what a sweep shows. No torch here."""

import math
from collections.abc import Sequence

from diffquant.evals.columns import POINTS
from diffquant.evals.stats import Difference
from diffquant.evals.tasks import kind_of
from diffquant.sweep.result import SweepResult
from diffquant.sweep.sizes import kl_of
from diffquant.sweep.table import Row, rows, tasks_of

# Points of a loss that an interval must rule out before "no measurable loss" says something.
_SETTLED = 1.0


def headline(sweep: SweepResult) -> list[str]:
    """The findings of a sweep, a sentence or two per task; failures first."""
    sentences = [f"{len(sweep.failed)} of {len(sweep.cells)} cells failed."] if sweep.failed else []
    table = rows(sweep)
    for task in tasks_of(sweep):
        changes = _leading_changes(task, table)
        if changes:
            tell = _of_items if kind_of(task).columns.by_item else _of_text
            sentences.append(tell(task, changes))
    return sentences or ["Nothing here is compared with 16 bits."]


def _leading_changes(task: str, table: Sequence[Row]) -> list[tuple[Row, Difference]]:
    """Changes from 16 bits by the first measure that any row has; for tasks scored by item one that has a sign."""
    columns = kind_of(task).columns
    for change in columns.changes:
        if columns.by_item and change.is_log:
            continue
        measured = [(row, change.of(row.results[task])) for row in table if row.results[task].result]
        if changes := [(row, drawn) for row, drawn in measured if drawn is not None]:
            return changes
    return []


def _of_items(task: str, changes: Sequence[tuple[Row, Difference]]) -> str:
    if all(math.isinf(drawn.low) for _, drawn in changes):
        return f"{task}: one item alone cannot tell a loss."
    worst, _ = min(changes, key=lambda change: change[1].mean)
    lower = [row.point.bits for row, drawn in changes if drawn.high < 0]
    of_all = f"of {len(changes)} configurations"
    if not lower:
        if text := _told_by_kl(task, changes):
            return text
        return (
            f"{task}: no measurable loss in any {of_all}, whose intervals all reach 0; the lowest is "
            f"{_named(worst, task)}."
        )
    told = f"{task}: {len(lower)} {of_all} lose; the most is lost by {_named(worst, task)}."
    safe = min((row.point.bits for row, _ in changes if row.point.bits > max(lower)), default=None)
    return told if safe is None else f"{told} From {safe} bits up no loss is measurable."


def _told_by_kl(task: str, changes: Sequence[tuple[Row, Difference]]) -> str | None:
    """The verdict by KL when too few items were scored to tell; None if they suffice, or KL was not measured."""
    found = [(row, drawn, kl) for row, drawn in changes if (kl := kl_of(row, task)) is not None and kl.low > 0]
    points = [(row, POINTS.of(row.results[task]), kl) for row, _, kl in found]
    open_ = [(row, drawn, kl) for row, drawn, kl in points if drawn is not None and drawn.low < -_SETTLED]
    if not open_:
        return None
    widest = max((drawn.high - drawn.low) / 2 for _, drawn, _ in open_)
    results = [result for row, _, _ in open_ if (result := row.results[task].result)]
    items = max(len(result.values or ()) for result in results)
    worst = max(open_, key=lambda each: each[2].mean)[0]
    return (
        f"{task}: {items} items cannot tell a loss, since differences are known to ±{widest:.0f} points; KL tells "
        f"{len(open_)} of {len(changes)} configurations from 16 bits. Most changed is {_named(worst, task)}."
    )


def _of_text(task: str, changes: Sequence[tuple[Row, Difference]]) -> str:
    # A loss in nats has a sign: what gained much has not changed least.
    ordered = sorted(changes, key=lambda change: abs(change[1].mean))
    least, most = (_named(row, task) for row, _ in (ordered[0], ordered[-1]))
    if len(ordered) == 1:
        return f"{task}: {most}."
    return f"{task}: least changed is {least}; most is {most}."


def _named(row: Row, task: str) -> str:
    """A row's name with everything known about its change."""
    known = [(change.text, change.of(row.results[task])) for change in kind_of(task).columns.changes]
    texts = [text(drawn) for text, drawn in known if text and drawn]
    return ", ".join([f"{row.model} at {row.point.label}", *texts])
