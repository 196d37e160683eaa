"""Figures of E4 and E7 on the page on Figure 8: what costs DIFF its bits, and whether training for it helps."""

from diffquant.measure.stats import Difference, mean_interval
from research.figure8 import factorial, tuned
from research.figure8.comparisons import PRIMARY
from research.figure8.plan import CELLS, KINDS, SHIPPED, best_rate
from research.pages.figure8 import THERE
from research.pages.render import ends, interval, table

FACTORIAL = factorial.primary_comparisons(THERE)


def part_of(effect: str, part: str) -> Difference:
    """Bits that an effect of E4 wins by the range or by the sensitivity."""
    cost = factorial.SECONDARY_COSTS[f"`{PRIMARY}`, from the {part}"]
    return mean_interval(factorial.bits_won(THERE, factorial.EFFECTS[effect], cost))


def seeds_on_two_processors() -> list[int]:
    """Seeds of E4 whose trainings ran with different instructions."""
    by_seed = {
        seed: {tuple(THERE[factorial.run_name(cell, seed)]["environment"]["instructions"]) for cell in CELLS}
        for seed in factorial.SEEDS
    }
    return [seed for seed, instructions in by_seed.items() if len(instructions) > 1]


def factorial_table() -> str:
    """E4: bits won by the second map, by the norm, and by both together beyond that."""

    def cell(measure: str, effect: str) -> str:
        won, p = FACTORIAL[measure, effect]
        return f"{interval(mean_interval(won), 2, True)}, p {p:.2g}: {factorial.verdict(won, p)}"

    rows = [[measure, *(cell(measure, effect) for effect in factorial.EFFECTS)] for measure in factorial.PRIMARY_COSTS]
    return table(["bits won by", *factorial.EFFECTS], rows)


def removed() -> tuple[float, float]:
    """Smallest and largest share of a kind's cost at `4:tensor` that training for it removes, in E7's first look."""
    costs = (
        [tuned.cost(THERE, kind, arm, SHIPPED) for arm in (tuned.CONTROL, tuned.ROUNDED[PRIMARY])] for kind in KINDS
    )
    return ends(1 - after / before for before, after in costs)


def still_needed(kind: str) -> float:
    """Bits that a kind needs more than the Transformer once both are trained for `4:tensor`, in E7's first look."""
    [won] = tuned.won(THERE, kind, tuned.ROUNDED[PRIMARY], [SHIPPED])
    return -won


# By measure, the verdicts on the second map, the norm and their interaction.
EFFECTS = [factorial.verdict(won, p) for won, p in FACTORIAL.values()]
NORM_LOSES_AT_EQUAL_STEPS = EFFECTS[:3] == ["undecided", "loses", "undecided"]
BOTH_LOSE_AT_4_BITS = EFFECTS[3:] == ["loses", "loses", "undecided"]
PARTS_READ_OTHERWISE = part_of("norm", "range").high < 0 and part_of("second map", "sensitivity").high < 0
ONLY_V1_WITHOUT_NORM_HAS_TWICE_THE_RATE = [best_rate(kind, THERE) for kind in CELLS.values()] == [
    8e-3 if kind == "diff-v1-no-norm" else 4e-3 for kind in CELLS.values()
]
