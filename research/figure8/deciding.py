"""What comparisons decide: intervals, p after Holm, and a word for each, as tables."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from diffquant.measure.stats import Difference, mean_interval
from diffquant.reports.tables import markdown
from research.figure8.direction import moved
from research.figure8.plan import Result

LEVEL = 0.05
# What an effect above zero and one below are called.
Words = tuple[str, str]
Name = TypeVar("Name", bound=Hashable)
DIFF_VERDICTS: Words = ("DIFF wins", "DIFF loses")


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t test that the mean is zero."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm's method, in the order they came.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scand. J. Statistics 6 (1979).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def shown(mean: Difference) -> str:
    """Write a mean with its interval."""
    return f"{mean.mean:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]"


def lacking(
    there: Mapping[str, Result],
    names: Sequence[str],
    runs: str = "trainings",
    withheld: str = "no interval and no verdict",
) -> str:
    """Say how many of some runs have a raw file and what is not shown until all have one; nothing if all have."""
    count = sum(name in there for name in names)
    return "" if count == len(names) else f"{count} of {len(names)} {runs} are there: {withheld} before all of them."


def interval(values: Sequence[float]) -> str:
    """Write the mean of values with Student's 95 % interval; a single value as it is, none as "none"."""
    return shown(mean_interval(values)) if len(values) > 1 else f"{values[0]:+.2f}" if values else "none"


def change(before: Sequence[float], after: Sequence[float]) -> tuple[Difference, float]:
    """Compute the change of a mean between two groups of trainings with Welch's interval, and its p."""
    from scipy.stats import ttest_ind

    return moved(before, after), float(ttest_ind(after, before, equal_var=False).pvalue)


def against_zero(values: Sequence[float]) -> tuple[Difference, float]:
    """Compute a mean with Student's interval, and the p of its being zero."""
    return mean_interval(values), p_value(values)


def verdicts(found: Mapping[Name, tuple[Difference, float]], words: Words) -> dict[Name, tuple[Difference, float, str]]:
    """Decide comparisons, each a mean with its p: the mean, p as Holm adjusts it over all of them, and the word."""
    adjusted = holm([p for _, p in found.values()])
    return {
        name: (mean, p, word(mean.mean, p, words)) for (name, (mean, _)), p in zip(found.items(), adjusted, strict=True)
    }


def decided(found: Mapping[str, tuple[Difference, float]], words: Words) -> list[str]:
    """Make a table of what comparisons decide."""
    rows = [[name, shown(mean), f"{p:.2g}", said] for name, (mean, p, said) in verdicts(found, words).items()]
    return markdown(["", "mean", "p, Holm", "verdict"], rows)


def word(mean: float, p: float, words: Words) -> str:
    """Choose the word for a mean whose p has been adjusted."""
    return "undecided" if p >= LEVEL else words[mean <= 0]


def section(title: str, lines: Sequence[str]) -> str:
    """Write a section of Markdown."""
    return f"## {title}\n\n" + "\n".join(lines)
