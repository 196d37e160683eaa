"""The report of a comparison: a table for a terminal, plain data for programs. No torch here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from diffquant.evals.comparison import Comparison
from diffquant.report.tables import aligned
from diffquant.support.listing import first_few
from diffquant.support.plain_data import JsonObject, finite
from diffquant.support.readable import Readable

# Most items that the text names for each kind of flip.
_NAMED_ITEMS = 20


@dataclass(frozen=True, repr=False)
class ComparisonReport(Readable):
    """The comparison of everything that two sources have in common.

    Attributes:
        before, after: the two sources as the caller named them, A and B.
        alone: results that only one of them has.
        left_out: measures that could not be compared, and why.
    """

    before: str
    after: str
    comparisons: list[Comparison]
    alone: list[str]
    left_out: list[str]

    def summary(self) -> str:
        """A table with one row per measure, and notes on how to read it."""
        heads = ["configuration", "task", "measure", "n", "A", "B", "B - A [95 %]", "McNemar p", "flips"]
        lines = [*map(_texts, self.comparisons)]
        told = [f"A is {self.before}", f"B is {self.after}", "", *aligned(heads, lines, 3), "", *self._notes()]
        return "\n".join(told)

    def to_dict(self) -> JsonObject:
        """Everything as plain data, with the ids of all flipped items."""
        rows = [
            {
                "configuration_a": comparison.outcomes[0].name,
                "configuration_b": comparison.outcomes[1].name,
                "task": comparison.task,
                "measure": comparison.measure,
                "n": comparison.n,
                "a": comparison.before,
                "b": comparison.after,
                "difference": comparison.difference.mean,
                "low": finite(comparison.difference.low),
                "high": finite(comparison.difference.high),
                "p": comparison.p,
                "gained": comparison.gained,
                "lost": comparison.lost,
            }
            for comparison in self.comparisons
        ]
        return {"a": self.before, "b": self.after, "comparisons": rows, "alone": self.alone, "left_out": self.left_out}

    def _notes(self) -> Iterable[str]:
        rows = self.comparisons
        yield (
            "Differences are paired over the same items: Bonett and Price's interval for right and wrong, Student's "
            "for other numbers. McNemar's exact test asks whether as many items became right (+) as wrong (-)."
        )
        if units := {f"{c.measure} in {c.unit.name}" for c in rows if c.unit.name}:
            yield f"Units: {', '.join(sorted(units))}."
        flipped = [c for c in rows if c.gained or c.lost]
        if len({comparison.name for comparison in rows}) == 1:
            for comparison in flipped:
                yield f"{comparison.task} {comparison.measure}: {_items_text(comparison)}."
        elif flipped:
            yield "The JSON form names the items that flipped."
        if len(rows) > 1:
            yield f"{len(rows)} differences are shown; by chance, one 95 % interval in twenty misses the truth."
        if any(before.prompts != after.prompts for before, after in (c.outcomes for c in rows)):
            yield "The prompts of A and B differ, around the same documents."
        if self.alone:
            yield f"Not compared, since one side alone has it: {first_few(self.alone)}."
        if self.left_out:
            yield f"Not compared: {first_few(self.left_out)}."


def _texts(comparison: Comparison) -> list[str]:
    unit, difference = comparison.unit, comparison.difference
    before, after, mean, low, high = (
        unit.factor * value
        for value in (comparison.before, comparison.after, difference.mean, difference.low, difference.high)
    )
    bounds = f" [{low:+{unit.format}}, {high:+{unit.format}}]" if math.isfinite(low) else ""
    return [
        comparison.name or "-",
        comparison.task,
        comparison.measure,
        str(comparison.n),
        format(before, unit.format),
        format(after, unit.format),
        f"{mean:+{unit.format}}{bounds}",
        "-" if comparison.p is None else f"{comparison.p:.2g}",
        "-" if comparison.p is None else f"+{len(comparison.gained or ())} -{len(comparison.lost or ())}",
    ]


def _items_text(comparison: Comparison) -> str:
    kinds = (("right", comparison.gained), ("wrong", comparison.lost))
    return "; ".join(f"became {kind}: items {first_few(items, ', ', _NAMED_ITEMS)}" for kind, items in kinds if items)
