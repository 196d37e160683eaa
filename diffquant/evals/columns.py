"""Columns: how tables and plots show a task's results. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diffquant.evals.stats import (
    Difference,
    Estimate,
    estimate,
    flips,
    mean_interval,
    paired_difference,
    recovery,
    wilson_interval,
)
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

MISSING = "-"
FAILED = "failed"


class Compared(NamedTuple):
    """A configuration's result with the 16-bit one.

    Attributes:
        result: result of the configuration, or None if its cell failed.
        baseline: result at 16 bits; None if there is none, or this is it.
    """

    result: TaskResult | None
    baseline: TaskResult | None


class Column(NamedTuple):
    """A column of the text table.

    Attributes:
        head: heading; {task} and {metric} stand for the names of the task and of its score.
        text: function from results to the text of a cell.
        needs: detail that results must have to show this column; empty if all show it.
    """

    head: str
    text: Callable[[Compared], str]
    needs: str = ""


class Metric(NamedTuple):
    """A number that plots draw: a score, or a change from 16 bits.

    Attributes:
        label: label of its axis.
        of: function from results to the number with its 95 % interval (of width zero if unknown), or to None if the
            number was not measured.
        text: function from a change to words, such as "-5.8 points [-10.4, -1.1]"; None for a score.
        is_log: whether its axis is logarithmic; such a number has no sign.
    """

    label: str
    of: Callable[[Compared], Difference | None]
    text: Callable[[Difference], str] | None = None
    is_log: bool = False


@dataclass(frozen=True)
class Columns:
    """How tables and plots show a task's results.

    Attributes:
        table: columns of the text table.
        changes: measures of the change from 16 bits, the most sensitive first.
        score: the score itself, or None if only the change matters.
        record: function from results to a row's unrounded numbers.
        notes: function from the results of all tasks with these columns to the notes below the table.
        by_item: whether results are scores of items. Tables show such tasks first.
        named_alone: whether headings name the task even if no other task is scored by item.
        has_own_names: whether names of numbers are prefixed with the task's name. Otherwise rows have these numbers
            even in a sweep without the task.
    """

    table: tuple[Column, ...]
    changes: tuple[Metric, ...]
    score: Metric | None
    record: Callable[[Compared], JsonObject]
    notes: Callable[[Sequence[TaskResult]], list[str]]
    by_item: bool = True
    named_alone: bool = True
    has_own_names: bool = True

    def shown(self, results: Sequence[TaskResult]) -> list[Column]:
        """The columns of the text table that these results can fill."""
        return [each for each in self.table if not each.needs or any(each.needs in r.details for r in results)]

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        """Headings of the text table's columns.

        Args:
            alone: whether the table shows no other task that is scored by item.
        """
        name = f"{task} " if self.named_alone or not alone else ""
        metric = results[0].metric if results else "score"
        return [column.head.format(task=name, metric=metric) for column in self.shown(results)]


def _difference(compared: Compared) -> Difference | None:
    """The paired difference of the score, as a fraction."""
    now, before = compared
    if now is None or before is None or now.values is None or before.values is None:
        return None
    return paired_difference(now.values, before.values)


def _points(compared: Compared) -> Difference | None:
    change = _difference(compared)
    return _percent(change) if change else None


def _percentage(compared: Compared) -> Difference | None:
    if compared.result is None:
        return None
    mean = _estimate(compared.result).mean
    return _percent(_interval(compared.result) or Difference(mean, mean, mean))


def _score_text(compared: Compared) -> str:
    if compared.result is None:
        return FAILED
    if compared.result.values:
        return bounded(_percentage(compared), ".1f")
    # For instance a perplexity over documents.
    return f"{_estimate(compared.result).mean:.4g}"


def bounded(number: Difference | None, spec: str, unit: str = "") -> str:
    """A number with its interval, such as "-5.8 points [-10.4, -1.1]"."""
    return MISSING if number is None else f"{number.mean:{spec}}{unit} [{number.low:{spec}}, {number.high:{spec}}]"


def kl_text(number: Difference | None) -> str:
    """A mean KL with its interval, if it has one."""
    return f"{number.mean:.2g}" if number and number.low == number.high else bounded(number, ".2g")


def _flips_text(compared: Compared) -> str:
    numbers = _flips(compared)
    return f"+{numbers['gained']} -{numbers['lost']}" if numbers["gained"] is not None else MISSING


def _flips(compared: Compared) -> JsonObject:
    now, before = compared
    names = ("gained", "lost", "choices_changed")
    if _difference(compared) is None or now is None or before is None:
        return dict.fromkeys(names)
    if not all(value in (0, 1) for each in (now, before) for value in each.values or ()):
        return dict.fromkeys(names)  # a mean over draws is neither right nor wrong
    right, right_before = ([bool(value) for value in each.values or ()] for each in (now, before))
    # An item may be right or wrong without a choice among answers, as a needle that is retrieved or not.
    has_choices = now.choices is not None and before.choices is not None
    chosen, chosen_before = (now.choices, before.choices) if has_choices else (right, right_before)
    gained, lost, changed = flips(right, right_before, chosen or (), chosen_before or ())
    return dict(zip(names, (gained, lost, changed if has_choices else None), strict=True))


def _item_record(compared: Compared) -> JsonObject:
    """Numbers of a task that is scored by item: score, difference from 16 bits, flips, recovery."""
    result, baseline = compared
    score = _estimate(result) if result else None
    change = _difference(compared)
    recovered = recovery(change, _estimate(baseline).mean) if change and baseline else None
    return {
        "metric": result.metric if result else None,
        "score": score.mean if score else None,
        "se": score.se if score else None,
        **ends(("low", "high"), _interval(result) if result else None),
        "n": score.n if score else None,
        "difference": change.mean if change else None,
        **ends(("difference_low", "difference_high"), change),
        **_flips(compared),
        "recovery": recovered.mean if recovered else None,
        **ends(("recovery_low", "recovery_high"), recovered),
    }


def _item_notes(results: Sequence[TaskResult]) -> list[str]:
    """Notes on scores of items."""
    counts = sorted({_estimate(result).n for result in results})
    if not counts:
        return []
    shots = sorted({result.shots for result in results if result.shots is not None})
    shown = f"many-shot after {', '.join(map(str, shots))} demonstrations" if shots else "zero-shot"
    return [
        f"{', '.join(map(str, counts))} items, {shown}. Brackets hold 95 % intervals: Wilson's for shares, "
        "Student's for other scores. The difference from 16 bits, in points, is paired over the same items; flips "
        "are the items that became right (+) and wrong (-)."
    ]


# The paired difference of a score.
POINTS = Metric("difference from 16 bits, points", _points, lambda change: bounded(change, "+.1f", " points"))

ITEMS = Columns(
    table=(
        Column("{task}{metric} % [95 %]", _score_text),
        Column("difference [95 %]", lambda compared: bounded(_points(compared), "+.1f")),
        Column("flips", _flips_text),
    ),
    changes=(POINTS,),
    score=Metric("score, %", _percentage),
    record=_item_record,
    notes=_item_notes,
)


def _estimate(result: TaskResult) -> Estimate:
    """The score of a result; without scores of items (a perplexity over documents) it has no standard error."""
    if result.values:
        return estimate(result.values)
    return Estimate(result.score or 0.0, None, result.n or 0)


def _interval(result: TaskResult) -> Difference | None:
    """Mean score with its 95 % interval, Wilson's if all are 0 or 1; None if there are no scores of items."""
    values = result.values
    if not values:
        return None
    n = len(values)
    if set(values) <= {0.0, 1.0}:
        share = sum(values) / n
        low, high = wilson_interval(round(sum(values)), n)
        # At 0 and 1 one end equals the score; do not let rounding push it past.
        return Difference(share, min(low, share), max(high, share))
    interval = mean_interval(values)
    if not all(0 <= value <= 1 for value in values):
        return interval
    # A score cannot leave [0, 1].
    return Difference(interval.mean, max(interval.low, 0.0), min(interval.high, 1.0))


def _percent(share: Difference) -> Difference:
    return Difference(100 * share.mean, 100 * share.low, 100 * share.high)


def ends(names: tuple[str, str], interval: Difference | None) -> JsonObject:
    """The two ends of an interval under these names, None if there is no interval."""
    return dict(zip(names, (interval.low, interval.high) if interval else (None, None), strict=True))
