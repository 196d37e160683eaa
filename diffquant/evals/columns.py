"""Columns: what tables and plots show of a task's results. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from diffquant.evals.stats import (
    Difference,
    Estimate,
    Flips,
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
    """A configuration's result beside the 16-bit one.

    Attributes:
        result: result of the configuration; None where its cell failed.
        baseline: result at 16 bits; None where the configuration is the 16-bit one, or there is none.
    """

    result: TaskResult | None
    baseline: TaskResult | None


class Drawn(NamedTuple):
    """What a plot draws of a result: a value, and the ends of its bar, which is none where they are the value."""

    value: float
    low: float
    high: float


class Change(NamedTuple):
    """A way to tell how far a configuration is from 16 bits.

    Attributes:
        label: text of its axis.
        is_log: whether it spans decades; it then has no sign.
        of: function from results to the change with its 95 % interval; None where that was not measured.
        text: function from a change to words, such as "-5.8 points [-10.4, -1.1]".
    """

    label: str
    is_log: bool
    of: Callable[[Compared], Drawn | None]
    text: Callable[[Drawn], str]


class Columns(Protocol):
    """The columns that a task's results fill in a table, and what a plot draws of them.

    Attributes:
        by_item: whether results are scores of items. Tables show such tasks first.
        changes: ways to tell how far a configuration is from 16 bits, the one that resolves most first.
        score_label: text of the axis of scores.
    """

    by_item: ClassVar[bool]
    changes: ClassVar[Sequence[Change]]
    score_label: ClassVar[str]

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        """Heads of the text table's columns.

        Args:
            alone: whether the table shows no other task that is scored by item.
        """

    def texts(self, compared: Compared, results: Sequence[TaskResult]) -> list[str]:
        """Texts of one row under the heads of these results."""

    def record(self, task: str, compared: Compared) -> JsonObject:
        """Numbers of one row in full."""

    def unmeasured(self) -> JsonObject:
        """Numbers that rows have also in a sweep without the task."""

    def score(self, compared: Compared) -> Drawn | None:
        """The score of one row by itself, with its 95 % interval; None where the change says it all."""

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        """What a reader must know, over all tasks with these columns."""


@dataclass(frozen=True)
class Accuracy:
    """A score over items, and how it compares with 16 bits on the same items.

    Attributes:
        interval: score with its 95 % interval; None where the score has no scores of items.
        difference, flips, recovery: comparison with 16 bits; None where there is no 16-bit result, flips also
            where the task keeps no choices.
    """

    score: Estimate
    interval: Difference | None = None
    difference: Difference | None = None
    flips: Flips | None = None
    recovery: Difference | None = None

    @classmethod
    def of(cls, result: TaskResult, baseline: TaskResult | None) -> "Accuracy":
        """The accuracy of a result, compared with the 16-bit one where there is one."""
        score, interval = _score(result), _share_interval(result.values) if result.values else None
        if baseline is None:
            return cls(score, interval)
        if result.values is None or baseline.values is None:
            return cls(score, interval)
        change = paired_difference(result.values, baseline.values)
        return cls(score, interval, change, _flips(result, baseline), recovery(change, _score(baseline).mean))


def _points(compared: Compared) -> Drawn | None:
    if compared.result is None:
        return None
    change = Accuracy.of(compared.result, compared.baseline).difference
    return _drawn(change) if change else None


def _points_text(change: Drawn) -> str:
    return f"{change.value:+.1f} points [{change.low:+.1f}, {change.high:+.1f}]"


# The paired difference of a score.
POINTS = Change("difference from 16 bits, points", is_log=False, of=_points, text=_points_text)


@dataclass(frozen=True)
class ItemColumns:
    """Columns of a task that is scored item by item: score, difference from 16 bits, flips.

    Attributes:
        named_alone: whether heads name the task also where no other is shown.
    """

    by_item: ClassVar[bool] = True
    changes: ClassVar[Sequence[Change]] = (POINTS,)
    score_label: ClassVar[str] = "score, %"

    named_alone: bool = True

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        metric = results[0].metric if results else "score"
        prefix = f"{task} " if self.named_alone or not alone else ""
        return [f"{prefix}{metric} % [95 %]", "difference [95 %]", "flips"]

    def texts(self, compared: Compared, results: Sequence[TaskResult]) -> list[str]:  # noqa: ARG002
        if compared.result is None:
            return [FAILED, MISSING, MISSING]
        accuracy = Accuracy.of(compared.result, compared.baseline)
        score, change, flipped = accuracy.interval, accuracy.difference, accuracy.flips
        return [
            f"{accuracy.score.mean:.4g}" if score is None else _percent_text(score, ".1f"),
            _percent_text(change, "+.1f") if change else MISSING,
            f"+{flipped.gained} -{flipped.lost}" if flipped else MISSING,
        ]

    def record(self, task: str, compared: Compared) -> JsonObject:
        result = compared.result
        accuracy = Accuracy.of(result, compared.baseline) if result else None
        score = accuracy.score if accuracy else None
        interval = accuracy.interval if accuracy else None
        change = accuracy.difference if accuracy else None
        flipped = accuracy.flips if accuracy else None
        recovered = accuracy.recovery if accuracy else None
        numbers = {
            "metric": result.metric if result else None,
            "score": score.mean if score else None,
            "se": score.se if score else None,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "n": score.n if score else None,
            "difference": change.mean if change else None,
            "difference_low": change.low if change else None,
            "difference_high": change.high if change else None,
            "gained": flipped.gained if flipped else None,
            "lost": flipped.lost if flipped else None,
            "choices_changed": flipped.choices if flipped else None,
            "recovery": recovered.mean if recovered else None,
            "recovery_low": recovered.low if recovered else None,
            "recovery_high": recovered.high if recovered else None,
        }
        return {f"{task} {name}": value for name, value in numbers.items()}

    def unmeasured(self) -> JsonObject:
        return {}

    def score(self, compared: Compared) -> Drawn | None:
        """The score in percent."""
        if compared.result is None:
            return None
        accuracy = Accuracy.of(compared.result, None)
        mean = accuracy.score.mean
        return _drawn(accuracy.interval or Difference(mean, mean, mean))

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        counts = sorted({_score(result).n for result in results})
        if not counts:
            return []
        shots = sorted({result.shots for result in results if result.shots is not None})
        shown = f"many-shot after {', '.join(map(str, shots))} demonstrations" if shots else "zero-shot"
        return [
            f"{', '.join(map(str, counts))} items, {shown}. Brackets hold 95 % intervals: Wilson's for shares, "
            "Student's for other scores. The difference from 16 bits, in points, is paired over the same items; flips "
            "are the items that became right (+) and wrong (-)."
        ]


def kl_text(change: Drawn) -> str:
    """A mean KL in words, with its interval where it has one."""
    return f"KL {change.value:.2g}" + (f" [{change.low:.2g}, {change.high:.2g}]" if change.low < change.high else "")


def number_text(value: float | None, spec: str) -> str:
    """A number as a table writes it."""
    return MISSING if value is None else format(value, spec)


def _score(result: TaskResult) -> Estimate:
    """The score of a result; one that has no scores of items (a perplexity over documents) has no standard error."""
    if result.values:
        return estimate(result.values)
    return Estimate(result.score or 0.0, None, result.n or 0)


def _share_interval(values: Sequence[float]) -> Difference:
    """Mean of scores with its 95 % interval, Wilson's where each is 0 or 1."""
    n = len(values)
    if set(values) <= {0.0, 1.0}:
        share = sum(values) / n
        low, high = wilson_interval(round(sum(values)), n)
        # Of none and of all, one end is the share itself but for rounding.
        return Difference(share, min(low, share), max(high, share))
    interval = mean_interval(values)
    if not all(0 <= value <= 1 for value in values):
        return interval
    # Nothing is retrieved less often than never, or more often than always.
    return Difference(interval.mean, max(interval.low, 0.0), min(interval.high, 1.0))


def _percent_text(interval: Difference, spec: str) -> str:
    mean, low, high = (format(100 * end, spec) for end in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def _drawn(share: Difference) -> Drawn:
    return Drawn(100 * share.mean, 100 * share.low, 100 * share.high)


def _flips(result: TaskResult, baseline: TaskResult) -> Flips | None:
    if result.choices is None or baseline.choices is None or result.values is None or baseline.values is None:
        return None
    correct, correct_before = ([bool(value) for value in values] for values in (result.values, baseline.values))
    return flips(correct, correct_before, result.choices, baseline.choices)
