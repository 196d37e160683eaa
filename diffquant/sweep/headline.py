"""The sentences that say what a sweep shows. No torch here."""

from collections.abc import Sequence
from typing import NamedTuple

from diffquant.evals.columns import Drawn
from diffquant.evals.tasks import kind_of
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import Row, rows, tasks_of


class _Change(NamedTuple):
    row: Row
    drawn: Drawn

    def named(self, task: str) -> str:
        """The row with all that is known of its change."""
        compared = self.row.results[task]
        known = [(change.text, change.of(compared)) for change in kind_of(task).columns.changes]
        texts = [text(drawn) for text, drawn in known if text and drawn]
        return ", ".join([f"{self.row.model} at {self.row.point.label}", *texts])


def headline(sweep: SweepResult) -> list[str]:
    """What the run shows, a sentence or two for each task; failures first."""
    sentences = [f"{len(sweep.failed)} of {len(sweep.cells)} cells failed."] if sweep.failed else []
    table = rows(sweep)
    for task in tasks_of(sweep):
        changes = _leading_changes(task, table)
        if changes:
            tell = _of_items if kind_of(task).columns.by_item else _of_text
            sentences.append(tell(task, changes))
    return sentences or ["Nothing here is compared with 16 bits."]


def _leading_changes(task: str, table: Sequence[Row]) -> list[_Change]:
    """The changes from 16 bits by the first measure that was taken of any row; one with a sign if items can be lost."""
    columns = kind_of(task).columns
    for change in columns.changes:
        if columns.by_item and change.is_log:
            continue
        measured = [(row, change.of(row.results[task])) for row in table if row.results[task].result]
        changes = [_Change(row, drawn) for row, drawn in measured if drawn is not None]
        if changes:
            return changes
    return []


def _of_items(task: str, changes: Sequence[_Change]) -> str:
    worst = min(changes, key=lambda change: change.drawn.value)
    lower = [change for change in changes if change.drawn.high < 0]
    of_all = f"of {len(changes)} configurations"
    if not lower:
        return (
            f"{task}: no measurable loss in any {of_all}, whose intervals all reach 0; the lowest is "
            f"{worst.named(task)}."
        )
    told = f"{task}: {len(lower)} {of_all} lose; the most is lost by {worst.named(task)}."
    kept = [change.row.point.bits for change in changes]
    safe = min((bits for bits in kept if bits > max(change.row.point.bits for change in lower)), default=None)
    return told if safe is None else f"{told} From {safe} bits up no loss is measurable."


def _of_text(task: str, changes: Sequence[_Change]) -> str:
    ordered = sorted(changes, key=lambda change: change.drawn.value)
    least, most = (change.named(task) for change in (ordered[0], ordered[-1]))
    if len(ordered) == 1:
        return f"{task}: {most}."
    return f"{task}: least changed is {least}; most is {most}."
