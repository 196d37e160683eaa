"""The figures of research/pages/figure8-seeds.md."""

import math
from collections.abc import Sequence
from functools import partial

from diffquant.evals.stats import mean_interval
from research.check.page import RESULTS, Page
from research.check.raw import interval
from research.figure8.analysis import LEVEL, holm, p_value
from research.studies.figure8_model import bits_won, parts_won
from research.studies.figure8_seeds import read_seed

PAGE = Page("research/pages/figure8-seeds.md")
# The first training is the page figure8's.
_FOLDERS = ("figure8-prose-kl", *(f"figure8-prose-kl-seed-{seed}" for seed in (1, 2, 3)))
SEEDS = {f"seed {seed}": read_seed(RESULTS / folder) for seed, folder in enumerate(_FOLDERS)}
PAGE.table(
    "perplexity at 16 bits, 16,384 characters | seed 0 | seed 1 | seed 2 | seed 3",
    lambda row, column: [math.exp(mean_interval(SEEDS[column][row]["nll"]).mean)],
)


def _bits(generation: str, row: str) -> list[float]:
    """Bits that a generation wins in each seed; behind a colon, the part of them that is predicted."""
    scheme, _, part = row.partition(": ")
    if not part:
        return [bits_won(seed[generation], seed["Transformer"], scheme) for seed in SEEDS.values()]
    at = ("range", "sensitivity").index(part)
    return [parts_won(seed[generation], seed["Transformer"], scheme)[at] for seed in SEEDS.values()]


def _won(row: str, generation: str) -> list[Sequence[float]]:
    bits = _bits(generation, row)
    return [*([each] for each in bits), interval(mean_interval(bits))]


PAGE.means(
    "All models read the same 21 windows of 256 tokens",
    {len(result["nll"]) for seed in SEEDS.values() for result in seed.values()} == {21}
    and {result["reading"]["window"] for seed in SEEDS.values() for result in seed.values()} == {256},
)

for name in ("V1", "V2"):
    PAGE.rows(f"{name}, bits won | seed 0 | seed 1 | seed 2 | seed 3 | mean", partial(_won, generation=f"DIFF {name}"))


PLAIN = ("4:tensor", "4:head", "4:row", "4:row:shift")
ALIKE = ("4:tensor:alike", "4:head:alike", "4:row:alike")
ALL = (*PLAIN, *ALIKE)
PARTS = ("4:tensor: range", "4:tensor: sensitivity")


def _certain(generation: str, rows: Sequence[str]) -> list[str]:
    """Rows whose interval over trainings does not contain zero."""
    means = {row: mean_interval(_bits(generation, row)) for row in rows}
    return [row for row, mean in means.items() if not mean.low <= 0 <= mean.high]


def _signs(generation: str, schemes: Sequence[str]) -> set[bool]:
    """Whether any and all trainings have a generation ahead."""
    return {bits > 0 for scheme in schemes for bits in _bits(generation, scheme)}


PAGE.means(
    "All four V1 need more bits than their Transformers under every granularity, with both maps rounded alike or not",
    _signs("DIFF V1", ALL) == {False},
)
PAGE.means(
    "All four V2 need more without `alike` and fewer with it",
    _signs("DIFF V2", PLAIN) == {False} and _signs("DIFF V2", ALIKE) == {True},
)
PAGE.means(
    "the sensitivity's part of the loss is negative in all four trainings",
    _signs("DIFF V1", PARTS[1:]) | _signs("DIFF V2", PARTS[1:]) == {False},
)
PAGE.means(
    "The range's part has either sign; its intervals contain zero",
    all(_signs(name, PARTS[:1]) == {False, True} and not _certain(name, PARTS[:1]) for name in ("DIFF V1", "DIFF V2")),
)
_P = {f"{name}, {scheme}": p_value(_bits(f"DIFF {name}", scheme)) for name in ("V1", "V2") for scheme in ALL}
HOLM = {comparison for comparison, p in zip(_P, holm(list(_P.values())), strict=True) if p <= LEVEL}
CERTAIN = [f"{name}, {scheme}" for name in ("V1", "V2") for scheme in _certain(f"DIFF {name}", ALL)]
PAGE.says("are {} comparisons, of which {} intervals miss zero", len(_P), len(CERTAIN))
PAGE.means(
    "By Holm's correction for 14, four of them remain at 5 %: V1's loss under `4:tensor`, `4:head` and `4:row:shift`, "
    "and V2's under `4:row:shift`",
    {"V1, 4:tensor", "V1, 4:head", "V1, 4:row:shift", "V2, 4:row:shift"} == HOLM,
)
PAGE.leaves("four of them remain at 5 %", "a level")
PAGE.leaves("makes 95 % intervals miss", "a level")
