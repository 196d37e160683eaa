"""The analyses of E5, E6 and E7 on trainings that were made up, with effects that are known, beside scipy and numpy."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import linregress, t, ttest_1samp, ttest_ind

from diffquant.errors import UsageError
from research.figure8 import depth, growth, sixteen, tuned
from research.figure8.comparisons import DIFFS, SIX, THREE
from research.figure8.growth_plot import plot_growth
from research.figure8.plan import GRID, KINDS, TUNED, listed
from research.figure8.ranges import LENGTHS, marks
from research.figure8.scoring import SCHEMES, STEPS

NOISE = np.random.default_rng(11)


def training(size="1.25M", steps=1800, arithmetic="bf16", **rest):
    """A raw result without scores."""
    return {
        "run": "x",
        **{"arithmetic": arithmetic, "size": size, "steps": steps, "rate": 4e-3, "training_text": {"sha256": "a"}},
        "environment": {"commit": "c"},
        "validation": {"nll": 3.5, "perplexity": 33.1},
    } | rest


def row_of(text, start):
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


# E5


def scored(bits, layers, plain, **rest):
    """A raw result whose KLs are those of `bits` fewer bits than 1 nat; a DIFF's excess grows by 0.1 a layer."""
    passages = [4**-bits * weight for weight in (0.5, 1.5)]
    errors = {scheme: {"variance": [1.0]} for scheme in SCHEMES}
    read = [
        {
            "sensitivity": {"first": 1.0 if plain else 2 ** (0.1 * (n + 1))},
            "errors": errors,
            "largest": [20.0],
            "lam": {"mean": 0.2 + 0.05 * n},
            "cancellation": 1.5,
        }
        for n in range(layers)
    ]
    books = {
        "reading": {"text": "b"},
        "kl": dict.fromkeys(SCHEMES, passages),
        "kl_of_steps": {f"{step:g}": [step**2 * each for each in passages] for step in STEPS},
        "layers": read,
    }
    return training(books=books, web={"kl": dict.fromkeys(SCHEMES, passages)}, **rest)


FIVE = {kind: NOISE.normal(-0.5, 0.1, len(SIX)) for kind in DIFFS}
TWELVE = {"diff-v1": NOISE.normal(0.6, 0.03, len(THREE)), "diff-v2": NOISE.normal(-0.5, 0.1, len(THREE))}


def deep_trainings():
    there = {}
    for name, seeds, layers, size, won in (("e1", SIX, 5, "1.25M", FIVE), ("e5", THREE, 12, "1.25M-deep", TWELVE)):
        for kind, (at, seed) in itertools.product(KINDS, enumerate(seeds)):
            bits = won[kind][at] if kind in DIFFS else 0.0
            there[f"{name}-{kind}-seed-{seed}"] = scored(bits, layers, kind not in DIFFS, size=size)
    return there


def test_bits_won_with_twelve_layers_and_the_change_from_five_are_scipys():
    text = depth.summary(deep_trainings())
    for kind in DIFFS:
        low, high = ttest_1samp(TWELVE[kind], 0.0).confidence_interval()
        row = row_of(text, f"{kind}, bits won with 12 layers")
        assert row[1] == f"{TWELVE[kind].mean():+.2f} [{low:+.2f}, {high:+.2f}]"
        welch = ttest_ind(TWELVE[kind], FIVE[kind], equal_var=False)
        low, high = welch.confidence_interval()
        row = row_of(text, f"{kind}, change from 5 layers")
        assert row[1] == f"{TWELVE[kind].mean() - FIVE[kind].mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    assert row_of(text, "diff-v1, bits won with 12 layers")[3] == "above zero"
    assert row_of(text, "diff-v1, change from 5 layers")[3] == "above zero"
    assert row_of(text, "diff-v2, change from 5 layers")[3] == "undecided"


def test_the_slope_of_the_excess_is_that_of_least_squares():
    there = deep_trainings()
    found = depth.slope_over(depth.PLACES["a layer's mean λ"])
    pair = there["e5-diff-v1-seed-101"], there["e5-transformer-seed-101"]
    expected = linregress([0.2 + 0.05 * n for n in range(12)], depth.excess(*pair)).slope
    assert found(*pair) == pytest.approx(expected)
    assert row_of(depth.summary(there), "slope over a layer's number")[1] == "+0.10 [+0.10, +0.10]"


def test_nothing_is_said_of_depth_before_all_nine_are_there():
    there = deep_trainings()
    del there["e5-diff-v1-seed-103"]
    assert depth.summary(there) == "8 of 9 trainings are there: no interval and no verdict before all of them."


# E6

R = {"diff-v1": 0.0, "diff-v2": 0.25}
GROWTH = {kind: NOISE.normal(rise, 0.02, len(growth.SEEDS)) for kind, rise in (("diff-v1", 0.5), ("diff-v2", 0.0))}


def layers_of(kind, log2_r, tops=(8.0, 32.0)):
    """Layers whose largest logits make log2 r by layer and as in Table 5."""
    size = 2.0**-log2_r if kind in DIFFS else 1.0
    return [
        {"largest": [top * size, top * size / 2], "near": [top * size], "weight_on_first": [0.25, 0.5]} for top in tops
    ]


def ranged(kind, growing, level=0.0, **rest):
    """A raw result in which log2 r is R and `level` at the end, and rises by `growing` in the last three doublings."""
    found = {}
    for step in marks(1800):
        before = growing * math.log2(1800 / max(step, 225)) / 3
        found[str(step)] = layers_of(kind, R.get(kind, 0.0) - before)
    lengths = {
        str(length): {start: {"layers": layers_of(kind, R.get(kind, 0.0)), "nll": 3.0} for start in ("plain", "first")}
        for length in LENGTHS
    }
    tops = [{"logits": {"top": {"1": max(layer["largest"])}}} for layer in layers_of(kind, R.get(kind, 0.0) + level)]
    return training(range_by_step=found, range_by_length=lengths, outliers={"layers": tops}, **rest)


def ranged_trainings():
    there = {}
    for kind, (at, seed) in itertools.product(KINDS, enumerate(growth.SEEDS)):
        rise = GROWTH[kind][at] if kind in DIFFS else 0.0
        there[f"e6-{kind}-seed-{seed}"] = ranged(kind, rise, level=0.01 * at * (kind in DIFFS))
    for kind in KINDS:
        for name, seeds in (("e1", SIX), ("e2", THREE), ("e3", THREE)):
            for seed in seeds:
                there[f"{name}-{kind}-seed-{seed}"] = steps_of(ranged(kind, 0.0, level=0.01 * seed * (kind in DIFFS)))
    for recipe, kind in itertools.product(growth.RECIPES, KINDS):
        off = 3.0 if recipe == "-decay-1" and kind in DIFFS else 1.0 * (kind in DIFFS)
        there[f"e6-{kind}{recipe}-seed-113"] = ranged(kind, 0.0, level=off)
    return there


def steps_of(result):
    """The result with KLs of fixed steps, which break-even is read of."""
    kl = {str(step): [0.01 * step**2] for step in (1, 2, 4, 8)}
    return result | {"books": {"reading": {"text": "b"}, "kl_of_steps": kl}}


def test_growth_over_training_is_scipys_and_what_does_not_grow_is_undecided():
    text = growth.summary(ranged_trainings())
    for kind in DIFFS:
        low, high = ttest_1samp(GROWTH[kind], 0.0).confidence_interval()
        row = row_of(text, f"{kind}, steps 225 to 1,800")
        assert row[1] == f"{GROWTH[kind].mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    assert row_of(text, "diff-v1, steps 225 to 1,800")[3] == "grows"
    assert row_of(text, "diff-v2, steps 225 to 1,800")[3] == "undecided"
    assert float(row_of(text, "E1")[2].split()[0]) == pytest.approx(0.25 + 0.01 * np.mean(SIX), abs=0.006)


def test_the_picture_has_every_training_their_means_and_where_they_break_even():
    there = ranged_trainings()
    (axis,) = plot_growth({name: result | {"tokens": 22e6} for name, result in there.items()}).axes
    heights = [line.get_ydata() for line in axis.lines]
    thin = [height for line, height in zip(axis.lines, heights, strict=True) if line.get_linewidth() < 1]
    assert len(thin) == len(DIFFS) * len(growth.SEEDS)
    assert thin[-1][-1] == pytest.approx(2 ** R["diff-v2"])
    assert math.log2(thin[0][-1] / thin[0][0]) == pytest.approx(GROWTH["diff-v1"][0])
    across = [height[0] for line, height in zip(axis.lines, heights, strict=True) if list(line.get_xdata()) == [0, 1]]
    # KLs that are the same squares in all models: both break even at 1, where the Transformer is.
    assert across == pytest.approx([1.0, 1.0, 1.0])


def test_r_by_layer_is_a_geometric_mean_and_that_of_table_5_the_largest():
    diff, plain = layers_of("diff-v1", 0.0, (4.0, 30.0)), layers_of("transformer", 0.0, (16.0, 30.0))
    assert growth.log2_r(diff, plain) == pytest.approx(1.0)
    assert growth.log2_r_of_table_5(diff, plain) == pytest.approx(0.0)


def test_one_training_is_compared_with_the_prediction_interval_of_nine():
    there = ranged_trainings()
    usual = [0.01 * seed for seed in SIX] + [0.0, 0.01, 0.02]
    low, high = growth.tenth(usual)
    half = t.ppf(0.975, 8) * np.std(usual, ddof=1) * math.sqrt(10 / 9)
    assert (low, high) == (pytest.approx(np.mean(usual) - half), pytest.approx(np.mean(usual) + half))
    rows = [line for line in growth.summary(there).splitlines() if "outside" in line]
    assert len(rows) == 2
    assert all("outside" in row.split("|")[-2] for row in rows)
    del there["e6-diff-v1-decay-0-seed-113"]
    assert "not yet" in growth.summary(there)


def test_nothing_is_said_of_growth_before_the_nine_usual_trainings_are_there():
    there = ranged_trainings()
    del there["e6-diff-v2-seed-115"]
    assert "8 of 9 trainings are there: no interval and no verdict" in growth.summary(there)
    assert "Primary" not in growth.summary(there)


# E7

COSTS = {"transformer": (0.04, 0.01), "diff-v1": (0.16, 0.02), "diff-v2": (0.08, 0.01)}
BITS = NOISE.normal(0, 0.02, len(tuned.SEEDS))


def fine_tuned(kind, arm, shift):
    """A raw result whose cost at every scheme is the kind's before, or after the arm trained for it."""
    before, after = COSTS[kind]
    cost = (before if arm == tuned.CONTROL else after) * 4 ** (-shift if kind in DIFFS else 0)
    nll = {"16": [3.0, 4.0]} | {key: [3.0 + cost, 4.0 + cost] for key in ("4:tensor", "4:row")}
    return training(
        steps=90,
        arithmetic="float32",
        books={"reading": {"text": "b"}, "nll": nll, "layers": [{"sensitivity": {"first": 1.0}}]},
        held_out={scheme: {"nll": np.mean(values)} for scheme, values in nll.items()},
        outliers={"logits": {"top": {"1": 30.0}}},
    )


def fine_tunings(seeds):
    return {
        tuned.run_name(kind, arm, seed): fine_tuned(kind, arm, BITS[at])
        for at, seed in enumerate(seeds)
        for kind, arm in itertools.product(KINDS, TUNED)
    }


def test_bits_won_after_training_for_it_are_those_of_the_costs():
    text = tuned.summary(fine_tunings(tuned.SEEDS))
    expected = BITS - 0.5
    low, high = ttest_1samp(expected, 0.0).confidence_interval()
    row = row_of(text, "diff-v1 over the Transformer")
    assert row[1] == f"{expected.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    assert row[3] == "DIFF loses"
    assert row_of(text, "diff-v2 over the Transformer")[3] == "undecided"
    gained = row_of(text, "diff-v1, `4:tensor`, books")[3]
    assert gained.startswith("+0.50 [")


def test_a_cost_that_is_not_above_zero_leaves_nats_in_place_of_bits():
    there = fine_tunings(tuned.SEEDS)
    run = tuned.run_name("diff-v1", "-tuned-tensor", 114)
    there[run]["books"]["nll"]["4:tensor"] = [2.9, 3.9]
    assert tuned.won(there, "diff-v1", "-tuned-tensor", tuned.SEEDS) == []
    assert "A cost is not above zero" in tuned.summary(there)


def test_the_first_look_has_no_interval_and_is_no_comparison():
    text = tuned.summary(fine_tunings([101]))
    assert "first look" in text
    assert "0 of 27 runs are there: no interval and no verdict before all of them." in text
    assert "Primary" not in text
    assert "[" not in text.split("\n\n")[1]


def test_fine_tunings_of_changed_sources_are_no_results():
    there = fine_tunings(tuned.SEEDS)
    there[tuned.run_name("diff-v2", "-tuned", 113)]["environment"]["commit"] = "c+changes"
    with pytest.raises(UsageError, match="no results"):
        tuned.summary(there)


# E8


def test_bits_won_by_the_nine_of_the_gpu_and_r_at_1024_tokens():
    won, there = NOISE.normal(0.3, 0.1, len(sixteen.SEEDS)), {}
    for kind, (at, seed) in itertools.product(KINDS, enumerate(sixteen.SEEDS)):
        read = ranged(kind, 0.0)["range_by_length"]
        bits = won[at] if kind in DIFFS else 0.0
        there[f"e8-{kind}-seed-{seed}"] = scored(bits, 12, kind not in DIFFS, size="16M") | {"range_by_length": read}
    low, high = ttest_1samp(won, 0.0).confidence_interval()
    text = sixteen.summary(there)
    assert row_of(text, "bits won in steps of 2")[2] == f"{won.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    assert row_of(text, "log2 r by layer, windows of 1,024 with <s>")[1:] == [
        "+0.00 [+0.00, +0.00]",
        "+0.25 [+0.25, +0.25]",
    ]
    del there["e8-diff-v2-seed-202"]
    assert sixteen.summary(there) == "8 of 9 trainings are there: no interval before all of them."


def test_the_runs_that_the_analyses_ask_for_are_the_lists():
    names = {run.name for run in listed()}
    assert not set(depth.NAMES) - names
    assert not set(growth.NAMES) - names
    assert not set(tuned.names_of([101, *tuned.SEEDS])) - names
    assert {f"e6-{kind}{recipe}-seed-113" for recipe in growth.RECIPES for kind in KINDS} < names
    assert len(GRID) == 4
