"""Compares two results on the same items, item by item. No torch here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diffquant.errors import UsageError
from diffquant.evals.stats import Difference, mcnemar, mean_interval, paired_difference
from diffquant.evals.task_result import TaskResult
from diffquant.support.listing import first_few
from diffquant.support.plain_data import JsonObject

# Fields of a task's identity that do not determine which items were asked.
_NOT_ASKED = ("name", "batch_tokens")


class Unit(NamedTuple):
    """How to write a measure: its name, the factor for its numbers, and the format of a value."""

    name: str
    factor: float
    format: str


PERCENT = Unit("%", 100, ".1f")
MARGIN = Unit("nats per 100 characters", 100, ".2f")
_NLL = Unit("nats per token", 1, ".4f")
PLAIN = Unit("", 1, ".4g")


@dataclass(frozen=True)
class Scores:
    """One number per item, with a weight for each; equal weights by default."""

    values: Sequence[float]
    unit: Unit
    weights: Sequence[float] | None = None

    @property
    def are_right_or_wrong(self) -> bool:
        return set(self.values) <= {0, 1}

    @property
    def faulty(self) -> list[int]:
        """Indices of the items without a finite number."""
        return [place for place, value in enumerate(self.values) if not math.isfinite(value)]


@dataclass(frozen=True)
class Outcome:
    """Scores of one configuration on one task.

    Attributes:
        name: name of the configuration; empty if its source has only this one.
        asked: everything that determines the items, by name; outcomes are comparable if it is equal.
        ids: id of each item, in an order that depends on the items alone; for a text the windows are the items.
            scores: scores by the measure's name, the most sensitive first.
        prompts: digest of the prompts, or None if the items determine them.
    """

    name: str
    task: str
    asked: JsonObject
    ids: Sequence[int | str]
    scores: Mapping[str, Scores]
    prompts: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two outcomes by one measure: before, after, and the paired difference after - before with its 95 % interval.

    Attributes:
        outcomes: outcomes before and after.
        gained, lost: items that became right, and that became wrong; None if items are not simply right or wrong.
    """

    outcomes: tuple[Outcome, Outcome]
    measure: str
    unit: Unit
    n: int
    before: float
    after: float
    difference: Difference
    gained: list[int | str] | None
    lost: list[int | str] | None

    @property
    def p(self) -> float | None:
        """P-value of McNemar's exact test of the hypothesis that gains and losses are equally likely."""
        return None if self.gained is None or self.lost is None else mcnemar(len(self.gained), len(self.lost))

    @property
    def name(self) -> str:
        """The configuration's name, or both names if they differ."""
        return " -> ".join(dict.fromkeys(outcome.name for outcome in self.outcomes))

    @property
    def task(self) -> str:
        return self.outcomes[0].task


def outcome_of(name: str, task: str, identity: JsonObject, result: TaskResult) -> Outcome:
    """Make the outcome of a cell; the task's identity tells which items were asked."""
    details = result.details
    asked = {field: value for field, value in identity.items() if field not in _NOT_ASKED}
    # Needles and windows depend on the tokenizer, which the identity does not name.
    asked |= {"needles": details["items"]} if "items" in details else {}
    scores: dict[str, Scores] = {}
    if "margins" in details:
        scores["margin"] = Scores(details["margins"], MARGIN)
    if result.values:
        shares = all(0 <= value <= 1 for value in result.values)
        scores[result.metric] = Scores(result.values, PERCENT if shares else PLAIN)
    if details.get("nll_by_window"):
        asked["tokens"] = sum(details["tokens_by_window"])
        scores["NLL"] = Scores(details["nll_by_window"], _NLL, details["tokens_by_window"])
    count = max((len(each.values) for each in scores.values()), default=0)
    return Outcome(name, task, asked, range(1, count + 1), scores)


def compare_outcomes(before: Outcome, after: Outcome) -> list[Comparison]:
    """Compare two outcomes by every measure that both have.

    Raises:
        UsageError: their tasks, items or texts differ, or they share no measure that is finite for every item.
    """
    if before.task != after.task:
        raise UsageError(f"A is of task {before.task} and B of {after.task}; only one task's results can be paired")
    differing = [
        f"{name}: {_told(before.asked, name)} and {_told(after.asked, name)}"
        for name in dict.fromkeys([*before.asked, *after.asked])
        if before.asked.get(name) != after.asked.get(name)
    ]
    if differing:
        raise UsageError(
            f"{before.task}: A and B were not asked the same ({first_few(differing)}); measure both with the same "
            "options, on the same items or text"
        )
    if list(before.ids) != list(after.ids):
        raise UsageError(
            f"{before.task}: A has scores of {len(before.ids)} items and B of {len(after.ids)}, which cannot be "
            "paired; measure both again"
        )
    shared = [name for name in before.scores if name in after.scores]
    sound = [name for name in shared if not before.scores[name].faulty and not after.scores[name].faulty]
    if not shared:
        raise UsageError(
            f"{before.task}: A and B have no scores of items in common ({_measures(before)}; {_measures(after)})"
        )
    if not sound:
        raise UsageError(f"nothing to compare: {first_few(left_out(before, after))}")
    return [_compared(name, before, after) for name in sound]


def left_out(before: Outcome, after: Outcome) -> list[str]:
    """The measures that `compare_outcomes` leaves out, and why: one side lacks it, or has a non-finite value."""
    told = []
    for name in dict.fromkeys([*before.scores, *after.scores]):
        for letter, outcome in (("A", before), ("B", after)):
            if name not in outcome.scores:
                told.append(f"{letter} has no {before.task} {name}")
            elif faulty := outcome.scores[name].faulty:
                items = first_few((outcome.ids[place] for place in faulty), ", ")
                told.append(f"{letter}'s {before.task} {name} is no finite number for item {items}")
    return told


def _compared(measure: str, before: Outcome, after: Outcome) -> Comparison:
    old, new = before.scores[measure], after.scores[measure]
    gained: list[int | str] | None = None
    lost: list[int | str] | None = None
    if old.weights is not None:
        difference = mean_interval([b - a for a, b in zip(old.values, new.values, strict=True)], old.weights)
    else:
        difference = paired_difference(new.values, old.values)
        if old.are_right_or_wrong and new.are_right_or_wrong:
            changed = [(i, b > a) for i, a, b in zip(before.ids, old.values, new.values, strict=True) if a != b]
            gained, lost = [i for i, is_gain in changed if is_gain], [i for i, is_gain in changed if not is_gain]
    means = [mean_interval(scores.values, scores.weights).mean for scores in (old, new)]
    return Comparison((before, after), measure, old.unit, len(old.values), means[0], means[1], difference, gained, lost)


def _told(asked: JsonObject, name: str) -> str:
    return str(asked.get(name, "absent"))


def _measures(outcome: Outcome) -> str:
    return ", ".join(outcome.scores) or "none"
