"""Columns: what tables and plots show of a task's results. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from diffquant.evals.stats import Difference, Estimate, Flips, estimate, flips, paired_difference, recovery
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


class Columns(Protocol):
    """The columns that a task's results fill in a table, and what a plot draws of them.

    Attributes:
        by_item: whether results are scores of items. Tables show such tasks first.
        is_log: whether what a plot draws spans decades.
    """

    by_item: ClassVar[bool]
    is_log: ClassVar[bool]

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        """Heads of the text table's columns.

        Args:
            alone: whether the table shows no other task that is scored by item.
        """

    def texts(self, compared: Compared) -> list[str]:
        """Texts of one row under the heads."""

    def record(self, task: str, compared: Compared) -> JsonObject:
        """Numbers of one row in full."""

    def unmeasured(self) -> JsonObject:
        """Numbers that rows have also in a sweep without the task."""

    def drawn(self, compared: Compared) -> Drawn | None:
        """What a plot draws of one row; None where that is nothing."""

    def label(self, task: str, result: TaskResult) -> str:
        """What the plot's axis says of them."""

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        """What a reader must know, over all tasks with these columns."""


@dataclass(frozen=True)
class Accuracy:
    """A score over items, and how it compares with 16 bits on the same items.

    Attributes:
        difference, flips, recovery: comparison with 16 bits; None where there is no 16-bit result, flips also
            where the task keeps no choices.
    """

    score: Estimate
    difference: Difference | None = None
    flips: Flips | None = None
    recovery: float | None = None

    @classmethod
    def of(cls, result: TaskResult, baseline: TaskResult | None) -> "Accuracy":
        """The accuracy of a result, compared with the 16-bit one where there is one."""
        score = _score(result)
        if baseline is None:
            return cls(score)
        paired = result.values is not None and baseline.values is not None
        return cls(
            score,
            paired_difference(result.values or [], baseline.values or []) if paired else None,
            _flips(result, baseline),
            recovery(score.mean, _score(baseline).mean),
        )


@dataclass(frozen=True)
class ItemColumns:
    """Columns of a task that is scored item by item: score, difference from 16 bits, flips, recovery.

    Attributes:
        named_alone: whether heads name the task also where no other is shown.
    """

    by_item: ClassVar[bool] = True
    is_log: ClassVar[bool] = False

    named_alone: bool = True

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        metric = results[0].metric if results else "score"
        prefix = f"{task} " if self.named_alone or not alone else ""
        return [f"{prefix}{metric}", "difference [95 %]", "flips", "recovery"]

    def texts(self, compared: Compared) -> list[str]:
        if compared.result is None:
            return [FAILED, MISSING, MISSING, MISSING]
        accuracy = Accuracy.of(compared.result, compared.baseline)
        score, change, flipped = accuracy.score, accuracy.difference, accuracy.flips
        return [
            f"{score.mean:.4g}" if score.se is None else f"{score.mean:.1%} ± {score.se:.1%}",
            f"{100 * change.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]" if change else MISSING,
            f"+{flipped.gained} -{flipped.lost}" if flipped else MISSING,
            number_text(accuracy.recovery, ".1%"),
        ]

    def record(self, task: str, compared: Compared) -> JsonObject:
        result = compared.result
        accuracy = Accuracy.of(result, compared.baseline) if result else None
        score = accuracy.score if accuracy else None
        change = accuracy.difference if accuracy else None
        flipped = accuracy.flips if accuracy else None
        numbers = {
            "metric": result.metric if result else None,
            "score": score.mean if score else None,
            "se": score.se if score else None,
            "n": score.n if score else None,
            "difference": change.mean if change else None,
            "difference_low": change.low if change else None,
            "difference_high": change.high if change else None,
            "gained": flipped.gained if flipped else None,
            "lost": flipped.lost if flipped else None,
            "choices_changed": flipped.choices if flipped else None,
            "recovery": accuracy.recovery if accuracy else None,
        }
        return {f"{task} {name}": value for name, value in numbers.items()}

    def unmeasured(self) -> JsonObject:
        return {}

    def drawn(self, compared: Compared) -> Drawn | None:
        """The score in percent; its bar is the interval of the paired difference from 16 bits."""
        if compared.result is None:
            return None
        accuracy = Accuracy.of(compared.result, compared.baseline)
        score, change = 100 * accuracy.score.mean, accuracy.difference
        if change is None:
            return Drawn(score, score, score)
        low, high = (score + 100 * (end - change.mean) for end in (change.low, change.high))
        # Nothing is retrieved less often than never, or more often than always.
        return Drawn(score, max(low, min(score, 0.0)), min(high, max(score, 100.0)))

    def label(self, task: str, result: TaskResult) -> str:
        return f"{task} {result.metric}, %\n{_score(result).n} items; bars: 95 %\nof the difference from 16 bits"

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        counts = sorted({_score(result).n for result in results})
        if not counts:
            return []
        shots = sorted({result.shots for result in results if result.shots is not None})
        shown = f"many-shot after {', '.join(map(str, shots))} demonstrations" if shots else "zero-shot"
        return [
            f"{', '.join(map(str, counts))} items, {shown}; ± is one standard error. The difference from 16 bits is "
            "paired over the same items, with its 95 % interval; flips are items that became right (+) and wrong (-)."
        ]


def number_text(value: float | None, spec: str) -> str:
    """A number as a table writes it."""
    return MISSING if value is None else format(value, spec)


def _score(result: TaskResult) -> Estimate:
    """The score of a result; one that has no scores of items (a perplexity over documents) has no standard error."""
    if result.values:
        return estimate(result.values)
    return Estimate(result.score or 0.0, None, result.n or 0)


def _flips(result: TaskResult, baseline: TaskResult) -> Flips | None:
    if result.choices is None or baseline.choices is None or result.values is None or baseline.values is None:
        return None
    correct, correct_before = ([bool(value) for value in values] for values in (result.values, baseline.values))
    return flips(correct, correct_before, result.choices, baseline.choices)
