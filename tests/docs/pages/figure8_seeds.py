"""The figures of docs/figure8-seeds.md."""

import math
from collections.abc import Callable

from diffquant.evals.stats import Difference, mean_interval
from studies.figure8_seeds import bits_won, predicted_bits, read_seed
from tests.docs.numbers import Expected
from tests.docs.page import RESULTS, Page

PAGE = Page("docs/figure8-seeds.md")
SEEDS = {f"seed {seed}": read_seed(RESULTS / f"figure8-prose-kl-seed-{seed}") for seed in (0, 1)}
PAGE.table(
    "perplexity at 16 bits, 16,384 characters | seed 0 | seed 1",
    lambda row, column: [math.exp(mean_interval(SEEDS[column][row]["nll"]).mean)],
)


def _bits(generation: str, row: str) -> list[float]:
    """Bits that a generation wins in each seed; behind a colon, the part of them that is predicted."""
    scheme, _, part = row.partition(": ")
    if not part:
        return [bits_won(seed, generation, scheme) for seed in SEEDS.values()]
    at = ("range", "sensitivity").index(part)
    return [predicted_bits(seed, generation, scheme)[at] for seed in SEEDS.values()]


def _won(generation: str) -> Callable[[str, str], list[Expected]]:
    def values(row: str, column: str) -> list[Expected]:
        bits = _bits(generation, row)
        if column in SEEDS:
            return [bits[list(SEEDS).index(column)]]
        mean = mean_interval(bits)
        return [mean.mean, mean.low, mean.high]

    return values


for name in ("V1", "V2"):
    PAGE.table(f"{name}, bits won | seed 0 | seed 1 | mean", _won(f"DIFF {name}"))


def _mean(generation: str, scheme: str) -> Difference:
    return mean_interval(_bits(generation, scheme))


PLAIN = ("4:tensor", "4:head", "4:row", "4:row:shift")
ALIKE = ("4:tensor:alike", "4:head:alike", "4:row:alike")

PAGE.means(
    "under every granularity but `head:alike`",
    [scheme for scheme in (*PLAIN, *ALIKE) if _mean("DIFF V1", scheme).high >= 0] == ["4:head:alike"],
)
PAGE.means("for V2 that is so per tensor", _mean("DIFF V2", "4:tensor").high < 0)
_OPEN = [
    _bits(generation, scheme)
    for generation, schemes in (("DIFF V1", ALIKE[1:2]), ("DIFF V2", (*PLAIN[1:], *ALIKE)))
    for scheme in schemes
]
PAGE.means(
    "The other comparisons have one sign in both trainings and an interval that contains zero",
    all(min(bits) * max(bits) > 0 and mean_interval(bits).low < 0 < mean_interval(bits).high for bits in _OPEN),
)
