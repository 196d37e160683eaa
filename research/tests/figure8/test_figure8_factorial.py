"""The factorial of the second map and V1's norm, on trainings that were made up, beside scipy and least squares."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from diffquant.errors import UsageError
from research.figure8 import factorial
from research.figure8.factorial import EFFECTS, NEIGHBOURS, PRIMARY_COSTS, SEEDS, bits_won, kl, run_name, summary
from research.figure8.plan import CELLS
from research.figure8.scoring import SCHEMES, STEPS

MAP, NORM, BOTH = -0.5, -0.25, -0.125
NOISE = np.random.default_rng(5).normal(0, 0.1, (len(SEEDS), len(CELLS)))


def training(bits, **changed):
    """A raw result whose KL is that of `bits` fewer bits needed than a KL of 1."""
    passages = [4**-bits * weight for weight in (0.5, 1.0, 1.5)]
    errors = {scheme: {"variance": [4**-bits]} for scheme in SCHEMES}
    return {
        "run": "x",
        **{"arithmetic": "bf16", "size": "1.25M", "steps": 1800, "rate": 4e-3, "training_text": {"sha256": "a"}},
        "environment": {"commit": "c", "instructions": ["avx2"]},
        "validation": {"perplexity": 35.0},
        "books": {
            "reading": {"text": "b"},
            "kl": dict.fromkeys(SCHEMES, passages),
            "kl_of_steps": {f"{step:g}": passages for step in STEPS},
            "layers": [{"sensitivity": {"first": 1.0}, "errors": errors}],
        },
        "web": {"kl": dict.fromkeys(SCHEMES, passages)},
    } | changed


def bits_of(number, seed):
    maps, norm = list(CELLS)[number]
    return 2 + MAP * (maps == 2) + NORM * norm + BOTH * (maps == 2) * norm + NOISE[seed, number]


def trained():
    return {
        run_name(cell, seed): training(bits_of(number, at))
        for at, seed in enumerate(SEEDS)
        for number, cell in enumerate(CELLS)
    }


def coefficients():
    """Least squares of each seed's four cells on maps and norm, coded as halves either side of zero."""
    halves = np.array([((maps == 2) - 0.5, norm - 0.5) for maps, norm in CELLS])
    design = np.column_stack([np.ones(4), halves, halves.prod(1)])
    seen = [[bits_of(number, at) for number in range(4)] for at in range(len(SEEDS))]
    return np.array([np.linalg.lstsq(design, row, rcond=None)[0][1:] for row in seen]).T


def test_effects_are_those_of_least_squares_with_students_intervals_of_scipy():
    there = trained()
    text = summary(there)
    for (effect, weights), expected in zip(EFFECTS.items(), coefficients(), strict=True):
        for measure, cost in PRIMARY_COSTS.items():
            assert bits_won(there, weights, cost) == pytest.approx(expected)
            low, high = ttest_1samp(expected, 0.0).confidence_interval()
            (row,) = (line for line in text.splitlines() if line.startswith(f"| {measure} | {effect} |"))
            assert f"{expected.mean():+.2f} [{low:+.2f}, {high:+.2f}]" in row
    assert text.count("| loses |") == 4


def test_both_effects_make_up_what_v1_loses_to_its_wide_heads_alone():
    there = trained()
    whole = bits_won(there, {(2, True): 1.0, (1, False): -1.0}, kl("4:tensor"))
    each = [bits_won(there, EFFECTS[effect], kl("4:tensor")) for effect in ("second map", "norm")]
    assert np.sum(each, 0) == pytest.approx(whole)
    apart = {name: np.mean(bits_won(there, weights, kl("4:tensor"))) for name, weights in NEIGHBOURS.items()}
    mean = [apart[f"norm with {maps}"] for maps in ("one map", "two maps")]
    assert np.mean(mean) == pytest.approx(np.mean(each[1]))
    assert mean[1] - mean[0] == pytest.approx(np.mean(bits_won(there, EFFECTS["interaction"], kl("4:tensor"))))


def test_nothing_is_said_before_all_trainings_of_the_four_cells_are_there():
    there = trained()
    del there[run_name((1, True), 112)]
    assert summary(there) == "23 of 24 trainings are there: no interval and no verdict before all of them."


def test_a_seed_with_a_training_that_diverged_takes_part_in_no_effect():
    there = trained()
    there[run_name((2, False), 109)] |= {"diverged": "the loss is nan"}
    assert bits_won(there, EFFECTS["norm"], kl("4:tensor")) == pytest.approx(np.delete(coefficients()[1], 2))


def test_trainings_of_changed_sources_are_no_results_and_other_instructions_are_named():
    there = trained()
    there[run_name((2, True), 110)]["environment"]["instructions"] = ["avx2", "avx512_bf16"]
    rows = [line for line in summary(there).splitlines() if line.endswith("| avx2; avx2 avx512_bf16 |")]
    assert [row.split()[1] for row in rows] == ["110"]
    there[run_name((2, True), 110)]["environment"]["commit"] = "c+changes"
    with pytest.raises(UsageError, match="no results"):
        factorial.summary(there)
