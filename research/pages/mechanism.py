"""Figures of E4 to E7 on the page on Figure 8: what costs DIFF its bits, and what earns them back."""

from statistics import fmean

from diffquant.measure.stats import Difference, mean_interval
from research.figure8 import depth, factorial, growth, tuned
from research.figure8.comparisons import MAIN, PRIMARY
from research.figure8.deciding import DIFF_VERDICTS, against_zero, lacking, verdicts
from research.figure8.plan import CELLS, KINDS, best_rate
from research.figure8.ranges import LENGTHS
from research.pages.figure8 import DIFF, NAMES, THERE, holds_zero
from research.pages.render import ends, interval, table

FACTORIAL = factorial.primary_comparisons(THERE)
TRAINED = growth.usual_pairs(THERE)
CHANGES = verdicts(growth.changes(TRAINED), growth.WORDS)
RECIPES = growth.recipe_rows(THERE)
TUNED_SEEDS = tuned.sound_seeds(THERE, tuned.SEEDS)
AFTER = tuned.ROUNDED[PRIMARY]


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
        won, p, said = FACTORIAL[measure, effect]
        return f"{interval(won, 2, True)}, p {p:.2g}: {said}"

    rows = [[measure, *(cell(measure, effect) for effect in factorial.EFFECTS)] for measure in factorial.PRIMARY_COSTS]
    return table(["bits won by", *factorial.EFFECTS], rows)


def depth_table() -> str:
    """E5: bits won with 5 layers and with 12; before all its trainings are there, how many are."""
    if said := lacking(THERE, depth.NAMES):
        return said
    found = verdicts(depth.primary_comparisons(THERE), depth.WORDS)
    rows = []
    for usual in MAIN:
        row = [NAMES[usual.kind], interval(mean_interval(usual.values(THERE, depth.EQUAL_STEPS)), 2, True)]
        for what in (depth.WITH_12, depth.CHANGE):
            won, p, verdict = found[f"{usual.kind}, {what}"]
            row.append(f"{interval(won, 2, True)}, p {p:.2g}: {verdict}")
        rows.append(row)
    return table(["logits in steps of 2", "bits won with 5 layers", depth.WITH_12, depth.CHANGE], rows)


def growth_table() -> str:
    """E6: log2 r by layer early and late in training, and in short and long windows."""
    rows = []
    for kind in DIFF:
        for name, ends_of in growth.SPANS.items():
            change, p, said = CHANGES[f"{kind}, {name}"]
            each = (mean_interval(growth.r_values(TRAINED[kind], take)) for take in ends_of)
            shown = (interval(mean, 2, True) for mean in (*each, change))
            rows.append([f"{NAMES[kind]}, {name}", *shown, f"{p:.2g}: {said}"])
    return table(["log2 r by layer", "from", "to", "change", "p, Holm"], rows)


def recipe_table() -> str:
    """E6: log2 r by layer of one training of each other recipe, beside where one more usual training would lie."""
    rows = [[NAMES[kind], *(cell.replace("-", "−") for cell in cells)] for kind, cells in RECIPES.items()]
    heads = ["log2 r by layer", "usual, with the interval for one more", "without `<s>`", "decay 0", "decay 1"]
    return table(heads, rows)


def first_token_moves() -> float:
    """Largest change of the mean of log2 r, over kinds and lengths of windows, that `<s>` in front of them makes."""
    means = {
        (kind, length, start): fmean(growth.r_values(TRAINED[kind], growth.in_windows(length, start)))
        for kind in DIFF
        for length in map(str, LENGTHS)
        for start in ("plain", "first")
    }
    return max(abs(means[kind, length, "first"] - means[kind, length, "plain"]) for kind, length, _ in means)


def tuned_won(kind: str, arm: str = AFTER) -> list[float]:
    """Bits that a kind wins over the Transformer at `4:tensor` after an arm of E7, by seed."""
    return tuned.won(THERE, kind, arm, TUNED_SEEDS)


def tuned_change(kind: str) -> Difference:
    """Bits won that training for `4:tensor` adds."""
    return mean_interval([b - a for a, b in zip(tuned_won(kind, tuned.CONTROL), tuned_won(kind), strict=True)])


TUNED = verdicts({kind: against_zero(tuned_won(kind)) for kind in DIFF}, DIFF_VERDICTS)


def costs(kind: str, arm: str) -> list[float]:
    """What `4:tensor` costs a kind after an arm of E7, in thousandths of a nat a token, by seed."""
    return [1000 * tuned.cost(THERE, kind, arm, seed) for seed in TUNED_SEEDS]


def tuned_table() -> str:
    """E7: what `4:tensor` costs without and with training for it, and the bits that DIFF wins."""
    rows = []
    for kind in KINDS:
        row = [NAMES[kind], *(interval(mean_interval(costs(kind, arm)), 1) for arm in (tuned.CONTROL, AFTER))]
        if kind in TUNED:
            _, p, said = TUNED[kind]
            won = (mean_interval(tuned_won(kind, arm)) for arm in (tuned.CONTROL, AFTER))
            row += [*(interval(each, 2, True) for each in won), f"{p:.2g}: {said}"]
        rows.append([*row, *["–"] * (6 - len(row))])
    heads = ["cost, 0.001 nats: plain", "trained for it", "bits won: plain", "trained for it", "p, Holm"]
    return table([f"`{PRIMARY}`", *heads], rows)


def removed() -> tuple[float, float]:
    """Smallest and largest share of a kind's mean cost at `4:tensor` that training for it removes."""
    return ends(1 - fmean(costs(kind, AFTER)) / fmean(costs(kind, tuned.CONTROL)) for kind in KINDS)


TRAINING, LENGTH = ([CHANGES[f"{kind}, {name}"][2] for kind in DIFF] for name in growth.SPANS)
TRAINING_IS_UNDECIDED = TRAINING == ["undecided", "undecided"]
LENGTH_SHRINKS_R_OF_V2 = LENGTH == ["undecided", "shrinks"]
LENGTH_DOES_NOT_GROW_R = "grows" not in LENGTH
OUTSIDE = [[cell.endswith("outside") for cell in cells[1:]] for cells in RECIPES.values()]
ONLY_V1_WITHOUT_FIRST_IS_OUTSIDE = OUTSIDE == [[True, False, False], [False] * 3] and RECIPES[DIFF[0]][1][0] == "+"
TUNED_IS_UNDECIDED = {said for _, _, said in TUNED.values()} == {"undecided"}
REMOVES_LESS_THAN_HALF = removed()[1] < 0.5
CHANGES_OF_BITS_HOLD_ZERO = all(holds_zero(tuned_change(kind)) for kind in DIFF)
# By measure, the verdicts on the second map, the norm and their interaction.
EFFECTS = [said for _, _, said in FACTORIAL.values()]
NORM_LOSES_AT_EQUAL_STEPS = EFFECTS[:3] == ["undecided", "loses", "undecided"]
BOTH_LOSE_AT_4_BITS = EFFECTS[3:] == ["loses", "loses", "undecided"]
PARTS_READ_OTHERWISE = part_of("norm", "range").high < 0 and part_of("second map", "sensitivity").high < 0
ONLY_V1_WITHOUT_NORM_HAS_TWICE_THE_RATE = [best_rate(kind, THERE) for kind in CELLS.values()] == [
    8e-3 if kind == "diff-v1-no-norm" else 4e-3 for kind in CELLS.values()
]
