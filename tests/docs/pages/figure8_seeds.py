"""The figures of docs/figure8-seeds.md."""

import math
from collections.abc import Callable, Sequence

from diffquant.evals.stats import Difference, mean_interval
from studies.figure8_seeds import bits_won, predicted_bits, read_seed
from tests.docs.numbers import Expected
from tests.docs.page import RESULTS, Page

PAGE = Page("docs/figure8-seeds.md")
SEEDS = {f"seed {seed}": read_seed(RESULTS / f"figure8-prose-kl-seed-{seed}") for seed in (0, 1, 2)}
PAGE.table(
    "perplexity at 16 bits, 16,384 characters | seed 0 | seed 1 | seed 2",
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
    PAGE.table(f"{name}, bits won | seed 0 | seed 1 | seed 2 | mean", _won(f"DIFF {name}"))


def _mean(generation: str, scheme: str) -> Difference:
    return mean_interval(_bits(generation, scheme))


PLAIN = ("4:tensor", "4:head", "4:row", "4:row:shift")
ALIKE = ("4:tensor:alike", "4:head:alike", "4:row:alike")


def _certain(generation: str, schemes: Sequence[str]) -> list[str]:
    """Schemes whose interval over trainings does not contain zero."""
    return [scheme for scheme in schemes if not _mean(generation, scheme).low <= 0 <= _mean(generation, scheme).high]


def _of_two(row: str) -> list[float]:
    """Mean and interval of V1's bits over the first two trainings."""
    mean = mean_interval(_bits("DIFF V1", row)[:2])
    return [mean.mean, mean.low, mean.high]


_V1, _V2 = (_certain(generation, (*PLAIN, *ALIKE)) for generation in ("DIFF V1", "DIFF V2"))
PAGE.means(
    "V1 needs more bits than its Transformer under every granularity; only for `tensor:alike`",
    all(_mean("DIFF V1", scheme).mean < 0 for scheme in (*PLAIN, *ALIKE))
    and [scheme for scheme in (*PLAIN, *ALIKE) if scheme != "4:tensor:alike"] == _V1,
)
PAGE.means(
    "needs more bits per tensor, per row and with `shift`, and fewer under `head:alike`",
    _V2 == ["4:tensor", "4:row", "4:row:shift", "4:head:alike"],
)
PAGE.means("all three trainings have V2 ahead", all(min(_bits("DIFF V2", scheme)) > 0 for scheme in ALIKE))
PAGE.means(
    "what is lost is sensitivity",
    [_certain(f"DIFF {name}", ["4:tensor: range", "4:tensor: sensitivity"]) for name in ("V1", "V2")]
    == [["4:tensor: sensitivity"]] * 2,
)
PAGE.says("V1's loss under `head:alike` was {} [{}, {}] over two trainings", *_of_two("4:head:alike"))
PAGE.says("under `tensor:alike` it was {} [{}, {}]", *_of_two("4:tensor:alike"))
PAGE.says("The range's part of V1's loss, {} [{}, {}] over two trainings", *_of_two("4:tensor: range"))
