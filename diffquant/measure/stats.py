"""Statistics of results: uncertainty, and paired comparison on the same items. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_Z95 = 1.959963984540054
_NEGLIGIBLE = 1e-22


@dataclass(frozen=True)
class Difference:
    """A mean, such as that of paired differences, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def times(self, factor: float) -> "Difference":
        """Return the mean and the ends of the interval, each multiplied by a positive factor."""
        return Difference(factor * self.mean, factor * self.low, factor * self.high)

    @property
    def plottable(self) -> "Difference":
        """The same mean with an interval that a plot can draw: an infinite interval becomes one of width zero."""
        return self if math.isfinite(self.high - self.low) else Difference(self.mean, self.mean, self.mean)


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, or None if there is only one value.

    It is s/√n with the sample standard deviation s, as in lm-eval.
    """
    n, mean = len(values), sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else None


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Return the mean of values - baseline over the same items, with a 95 % interval.

    If all values are 0 or 1, the interval is Bonett and Price's adjusted Wald: it adds one item to each kind of
    disagreement, so that few changed items do not give a falsely narrow interval. Otherwise it is Student's interval
    of the mean difference.

    Source: Bonett and Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions
    Based on Paired Data", Journal of Educational and Behavioral Statistics 37 (2012).
    """
    differences = [a - b for a, b in zip(values, baseline, strict=True)]
    if {*values, *baseline} <= {0.0, 1.0}:
        return _bonett_price(differences.count(1), differences.count(-1), len(differences))
    return mean_interval(differences)


def mean_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Difference:
    """Return the mean of values with Student's 95 % interval, which is infinite if there is only one value.

    Args:
        weights: weight of each value, such as the number of tokens over which it is a mean; equal by default. Values of
            weight 0 are ignored. With weights, the mean is a ratio of two sums, and the interval is a first-order
            approximation.
    """
    pairs = zip(values, [1.0] * len(values) if weights is None else weights, strict=True)
    weighed = [(value, weight) for value, weight in pairs if weight]
    n, total = len(weighed), sum(weight for _, weight in weighed)
    mean = sum(weight * value for value, weight in weighed) / total
    if n == 1:
        return Difference(mean, -math.inf, math.inf)
    squares = sum((weight * (value - mean)) ** 2 for value, weight in weighed)
    half = _t95(n - 1) * math.sqrt(squares * n / (n - 1)) / total
    return Difference(mean, mean - half, mean + half)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion of n trials.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927).
    """
    share, z2 = successes / n, _Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def count_flips(
    values: Sequence[float],
    baseline: Sequence[float],
    choices: Sequence[int] | None,
    baseline_choices: Sequence[int] | None,
) -> tuple[int, int, int | None]:
    """Count the items that became right, those that became wrong, and those whose choice changed.

    Args:
        values, baseline: 1 for each right item and 0 for each wrong one.
        choices, baseline_choices: answer to each item, or None if an item has no choice among answers: a needle is
            retrieved or not. The last count is None then.
    """
    now_and_before = list(zip(values, baseline, strict=True))
    gained = sum(now > before for now, before in now_and_before)
    lost = sum(now < before for now, before in now_and_before)
    if choices is None or baseline_choices is None:
        return gained, lost, None
    return gained, lost, sum(a != b for a, b in zip(choices, baseline_choices, strict=True))


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Compute the two-sided p-value of McNemar's exact test that gains and losses are equally likely.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 12 (1947); its binomial form.
    """
    flipped, fewer = gained + lost, min(gained, lost)
    # Binomial coefficients divided by the largest one, from the middle down, until they are negligible.
    term, half, tail = 1.0, 0.0, 0.0
    for count in range(flipped // 2, -1, -1):
        half += term
        if count <= fewer:
            tail += term
        term *= count / (flipped - count + 1)
        if term == 0 or term < tail * _NEGLIGIBLE:
            break
    # Both halves share the middle one if there is one.
    return min(1.0, 2 * tail / (2 * half - (flipped % 2 == 0)))


def recovery(difference: Difference, baseline: float) -> Difference | None:
    """Return the quantized score divided by the 16-bit score, with its 95 % interval, or None if the divisor is 0.

    The interval treats the 16-bit score as exact.

    Args:
        difference: quantized minus 16-bit score, with its interval.
        baseline: 16-bit score.
    """
    if not baseline:
        return None
    return Difference(*(1 + end / baseline for end in (difference.mean, difference.low, difference.high)))


@cache
def _t95(degrees: int) -> float:
    """Return the half-width, in standard errors, of the interval that holds 95 % of Student's t."""
    low, high = 0.0, 13.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < 0.95 else (low, middle)
    return high


def _t_within(t: float, degrees: int) -> float:
    """Return the probability that Student's |T| is at most t.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _bonett_price(gained: int, lost: int, n: int) -> Difference:
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    centre = up - down
    half = _Z95 * math.sqrt((up + down - centre**2) / (n + 2))
    return Difference((gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half))
