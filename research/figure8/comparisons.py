"""What protocol.md compares: pairs of trainings by seed, and what is measured of a pair."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from diffquant.errors import UsageError
from diffquant.measure.stats import Difference, mean_interval
from diffquant.support.installation import CHANGED
from research.figure8.plan import EQUALIZED, KINDS, OUTLIERS, Result
from research.studies.figure8_model import advantage, parts_won

DIFFS = KINDS[1:]
SIX, THREE = range(101, 107), range(101, 104)
PRIMARY = "4:tensor"
# What the trainings of a comparison have in common.
_SAME: dict[str, Callable[[Result], Any]] = {
    "arithmetic": lambda each: each["arithmetic"],
    "size": lambda each: each["size"],
    "steps": lambda each: each["steps"],
    "training text": lambda each: each["training_text"]["sha256"],
    "scored text": lambda each: each.get("books", {}).get("reading", {}).get("text"),
}

# Ratios of the ranges of logits, the Transformer's over the DIFF model's.
RATIOS = (1, 2, 4, 8)
# The paper's: largest attention logits of its Transformer and of its DIFF, arXiv 2410.05258, Table 5.
PAPER_RATIO = 318.0 / 38.8

Measure = Callable[[Result, Result], float]


@dataclass(frozen=True)
class Comparison:
    """One kind against another, seed by seed.

    Attributes:
        kind, base: kinds of the models, bits won by the first.
        experiment: beginning of the runs' names.
        seeds: seeds that the protocol asks for.
    """

    kind: str
    base: str = "transformer"
    experiment: str = "e1"
    seeds: Sequence[int] = SIX

    @property
    def names(self) -> list[tuple[str, str]]:
        """Names of each seed's two runs."""
        return [
            (f"{self.experiment}-{self.kind}-seed-{seed}", f"{self.experiment}-{self.base}-seed-{seed}")
            for seed in self.seeds
        ]

    def is_complete(self, there: Mapping[str, Result]) -> bool:
        """Whether every training is there, diverged or not."""
        return all(name in there for pair in self.names for name in pair)

    def values(self, there: Mapping[str, Result], measure: Measure) -> list[float]:
        """A measure of every pair of trainings that is there; one that diverged has none.

        Raises:
            UsageError: the trainings may not be compared.
        """
        found = [(there[a], there[b]) for a, b in self.names if a in there and b in there]
        check_alike([result for pair in found for result in pair])
        return [measure(*pair) for pair in found if not any("diverged" in result for result in pair)]


def check_alike(trainings: Sequence[Result], apart_from: Sequence[str] = ()) -> None:
    """Check that trainings may be compared.

    Args:
        apart_from: what they may differ in, as `_SAME` names it.

    Raises:
        UsageError: their sources were not committed, or they differ in arithmetic, size, steps or text.
    """
    if changed := [each["run"] for each in trainings if (each["environment"]["commit"] or CHANGED).endswith(CHANGED)]:
        raise UsageError(f"sources differed from their commit, so these are no results: {', '.join(changed)}")
    for what, of in ((what, of) for what, of in _SAME.items() if what not in apart_from):
        found = {of(each): each["run"] for each in trainings if of(each) is not None}
        if len(found) > 1:
            listed = ", ".join(f"{value} ({run})" for value, run in found.items())
            raise UsageError(f"trainings that differ in {what} are not compared: {listed}")


def bits_won(scheme: str, text: str = "books", among: str = "kl") -> Measure:
    """Measure of a comparison: bits that the first model may do with less for the same KL, averaged over passages."""
    return lambda diff, plain: advantage(fmean(diff[text][among][scheme]), fmean(plain[text][among][scheme]))


def range_won(diff: Result, plain: Result) -> float:
    """Bits that a smaller range wins at the primary scheme, as the simple model of `figure8_model` says."""
    return parts_won(diff["books"], plain["books"], PRIMARY)[0]


def sensitivity_won(diff: Result, plain: Result) -> float:
    """Bits that a smaller sensitivity wins, likewise."""
    return parts_won(diff["books"], plain["books"], PRIMARY)[1]


def won_by_steps(step: int, wider: int) -> Measure:
    """Measure the bits won where the first model's logits are rounded to one step and the other's to another."""
    return lambda diff, plain: advantage(
        fmean(diff["books"]["kl_of_steps"][str(step)]), fmean(plain["books"]["kl_of_steps"][str(wider)])
    )


def won_at_ratio(ratio: int) -> Measure:
    """Measure the bits won if the Transformer's logits ranged `ratio` times as far as the DIFF model's, in every layer.

    Args:
        ratio: one of `RATIOS`.
    """
    return won_by_steps(1, ratio)


def break_even(diff: Result, plain: Result) -> float:
    """Find the ratio of ranges at which neither model wins bits, as its binary logarithm.

    Bits won are taken as straight between the ratios that were measured, over their binary logarithms, and go on
    straight beyond them.
    """
    won = [won_at_ratio(ratio)(diff, plain) for ratio in RATIOS]
    # RATIOS double, so places in the list are binary logarithms.
    before = next((place for place in range(len(won) - 1) if won[place + 1] >= 0), len(won) - 2)
    return before - won[before] / (won[before + 1] - won[before])


def as_ratio(logarithms: Sequence[float]) -> Difference:
    """Turn binary logarithms of ratios into their geometric mean with Student's 95 % interval."""
    mean = mean_interval(logarithms)
    return Difference(2**mean.mean, 2**mean.low, 2**mean.high)


def perplexity_ratio(diff: Result, plain: Result) -> float:
    """Perplexity on the held-out training text over the other model's."""
    return math.exp(diff["validation"]["nll"] - plain["validation"]["nll"])


def largest_logit_ratio(diff: Result, plain: Result) -> float:
    """Largest logit, of both maps of all layers, over the other model's."""
    top, other = (each["outliers"]["overall"]["logits"]["top"]["1"] for each in (diff, plain))
    return float(top / other)


# What is measured beside all schemes, and of controls.
PARTS: dict[str, Measure] = {
    "4:tensor, from the range": range_won,
    "4:tensor, from the sensitivity": sensitivity_won,
    **{f"logits in steps of {step}": bits_won(step, among="kl_of_steps") for step in ("1", "2", "4", "8")},
    **{f"queries and keys, {s}": bits_won(s, among="kl_of_qk") for s in ("4:tensor", "4:head", "4:row")},
    **{f"web, {s}": bits_won(s, "web") for s in (PRIMARY, "4:row", "4:row:shift")},
    "perplexity over the Transformer's": perplexity_ratio,
}
OF_CONTROLS: dict[str, Measure] = {
    "bits won at `4:tensor`": bits_won(PRIMARY),
    "range": range_won,
    "sensitivity": sensitivity_won,
    "perplexity": perplexity_ratio,
}
OF_SIZE = OF_CONTROLS | {"largest logit over the Transformer's": largest_logit_ratio}
# Parameters of the models that a line through the sizes is read at: SmolLM2's, and the paper's.
FAR = {"135 million": 135e6, "3 billion": 3e9}
MAIN = [Comparison(kind) for kind in DIFFS]
CONTROLS = [
    *(Comparison(kind, seeds=THREE) for kind in ("half-heads", "gated")),
    *(Comparison(kind + EQUALIZED, "transformer" + EQUALIZED, seeds=THREE) for kind in DIFFS),
]
LONGER = [Comparison(kind, experiment="e2", seeds=THREE) for kind in DIFFS]
LARGER = [replace(comparison, experiment="e3") for comparison in LONGER]
ON_PURPOSE = [Comparison(kind + OUTLIERS, "transformer" + OUTLIERS, seeds=THREE) for kind in DIFFS]
