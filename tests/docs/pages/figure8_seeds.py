"""The figures of docs/figure8-seeds.md."""

import math
from collections.abc import Callable, Sequence

from diffquant.evals.stats import Difference, mean_interval
from studies.figure8_seeds import bits_won, predicted_bits, read_seed
from tests.docs.numbers import Expected
from tests.docs.page import RESULTS, Page

PAGE = Page("docs/figure8-seeds.md")
SEEDS = {f"seed {seed}": read_seed(RESULTS / f"figure8-prose-kl-seed-{seed}") for seed in (0, 1, 2, 3)}
PAGE.table(
    "perplexity at 16 bits, 16,384 characters | seed 0 | seed 1 | seed 2 | seed 3",
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
    PAGE.table(f"{name}, bits won | seed 0 | seed 1 | seed 2 | seed 3 | mean", _won(f"DIFF {name}"))


def _over(generation: str, row: str, seeds: int = len(SEEDS)) -> Difference:
    """Mean of the bits over the first trainings, with its interval."""
    return mean_interval(_bits(generation, row)[:seeds])


def _told(generation: str, row: str, seeds: int) -> tuple[float, float, float]:
    mean = _over(generation, row, seeds)
    return mean.mean, mean.low, mean.high


PLAIN = ("4:tensor", "4:head", "4:row", "4:row:shift")
ALIKE = ("4:tensor:alike", "4:head:alike", "4:row:alike")
ALL = (*PLAIN, *ALIKE)
PARTS = ("4:tensor: range", "4:tensor: sensitivity")


def _certain(generation: str, rows: Sequence[str], seeds: int = len(SEEDS)) -> list[str]:
    """Rows whose interval over the first trainings does not contain zero."""
    means = {row: _over(generation, row, seeds) for row in rows}
    return [row for row, mean in means.items() if not mean.low <= 0 <= mean.high]


PAGE.means(
    "V1 needs more bits than its Transformer under every granularity",
    _certain("DIFF V1", ALL) == list(ALL) and all(_over("DIFF V1", scheme).mean < 0 for scheme in ALL),
)
PAGE.means(
    "unless the maps are rounded alike: then it needs fewer per head and per row, and per tensor the interval contains",
    _certain("DIFF V2", ALL) == [*PLAIN, "4:head:alike", "4:row:alike"]
    and [_over("DIFF V2", scheme).mean > 0 for scheme in ALL] == [scheme in ALIKE for scheme in ALL],
)
PAGE.means("all four trainings have V2 ahead", all(min(_bits("DIFF V2", scheme)) > 0 for scheme in ALIKE))
PAGE.means(
    "what is lost is sensitivity",
    [_certain(f"DIFF {name}", PARTS) for name in ("V1", "V2")] == [["4:tensor: sensitivity"]] * 2,
)
PAGE.says(
    "Over two, V1's loss under `head:alike` was {} [{}, {}], and the range's part of its loss {} [{}, {}]",
    *_told("DIFF V1", "4:head:alike", 2),
    *_told("DIFF V1", "4:tensor: range", 2),
)
PAGE.means(
    "the third made the first certain and found no range",
    [_certain("DIFF V1", ["4:head:alike", "4:tensor: range"], seeds) for seeds in (2, 3)]
    == [["4:tensor: range"], ["4:head:alike"]],
)
_NEW = (("DIFF V1", "4:tensor:alike"), ("DIFF V2", "4:head"), ("DIFF V2", "4:row:alike"))
PAGE.says(
    "V1's loss under `tensor:alike` ({} [{}, {}]), V2's per head ({} [{}, {}]) and V2's gain under `row:alike` "
    "({} [{}, {}])",
    *(value for generation, scheme in _NEW for value in _told(generation, scheme, 3)),
)
PAGE.means(
    "the fourth made them so. No interval that missed zero over three trainings contains it over four",
    all(
        set(_certain(name, (*ALL, *PARTS)))
        == set(_certain(name, (*ALL, *PARTS), 3)) | {scheme for kind, scheme in _NEW if kind == name}
        for name in ("DIFF V1", "DIFF V2")
    ),
)
