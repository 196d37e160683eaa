"""The straight line through two sizes of model, and what it would say of larger ones."""

import math
from collections.abc import Sequence
from statistics import fmean, variance

from diffquant.measure.stats import Difference


def along(small: Sequence[float], large: Sequence[float], place: float) -> Difference:
    """A line through the means of two groups of trainings, with Welch's 95 % interval.

    Args:
        small, large: a measure of each training, two or more of either size.
        place: where the line is read: 0 at the smaller size, 1 at the larger, 2 as far beyond.
    """
    return _combined((small, 1 - place), (large, place))


def moved(small: Sequence[float], large: Sequence[float], distance: float = 1.0) -> Difference:
    """Change from the first group's mean to the second's over a distance, with Welch's 95 % interval."""
    return _combined((small, -1 / distance), (large, 1 / distance))


def place_of(parameters: float, small: float, large: float) -> float:
    """Where a model stands on the line by the logarithm of its parameters, as `along` takes it."""
    return math.log(parameters / small) / math.log(large / small)


def _combined(*groups: tuple[Sequence[float], float]) -> Difference:
    """A weighted sum of the groups' means, whose variances differ.

    Source: Welch, "The generalization of 'Student's' problem when several different population variances are
    involved", Biometrika 34 (1947).
    """
    from scipy.stats import t

    mean = sum(weight * fmean(values) for values, weight in groups)
    parts = [(weight * weight * variance(values) / len(values), len(values) - 1) for values, weight in groups]
    whole = sum(part for part, _ in parts)
    if not whole:
        return Difference(mean, mean, mean)
    half = t.ppf(0.975, whole**2 / sum(part**2 / degrees for part, degrees in parts)) * math.sqrt(whole)
    return Difference(mean, mean - half, mean + half)
