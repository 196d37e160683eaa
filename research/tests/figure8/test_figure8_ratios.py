"""Bits won by ratio of ranges, from the raw files by numpy and scipy, beside the analysis of the trainings."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from scipy.stats import ttest_1samp

from research.figure8.comparisons import LARGER, LONGER, MAIN, RATIOS, as_ratio, break_even, won_at_ratio
from research.figure8.plan import results

FOLDER = Path(__file__).parents[2] / "figure8" / "results"
SEEDS = {"e1": range(101, 107), "e2": range(101, 104), "e3": range(101, 104)}


def kl(run, step):
    """Mean KL in nats of a training whose logits were rounded to a step, from its raw file."""
    with lzma.open(FOLDER / f"{run}.json.xz") as file:
        return np.mean(json.load(file)["books"]["kl_of_steps"][step])


def won_by_hand(experiment, kind):
    """Bits won [seeds, 4] at the ratios 1, 2, 4 and 8: a factor of four in KL is one bit."""
    return np.array(
        [
            [
                np.emath.logn(
                    4, kl(f"{experiment}-transformer-seed-{seed}", step) / kl(f"{experiment}-{kind}-seed-{seed}", "1")
                )
                for step in ("1", "2", "4", "8")
            ]
            for seed in SEEDS[experiment]
        ]
    )


@pytest.mark.parametrize("comparison", [*MAIN, *LONGER, *LARGER], ids=lambda each: f"{each.experiment}-{each.kind}")
def test_bits_won_by_ratio_of_ranges_are_those_of_numpy_and_scipy(comparison):
    there, expected = results(), won_by_hand(comparison.experiment, comparison.kind)
    found = [comparison.values(there, won_at_ratio(ratio)) for ratio in RATIOS]
    np.testing.assert_allclose(np.transpose(found), expected, rtol=0, atol=1e-12)
    level = [brentq(interp1d(range(4), won), 0, 3) for won in expected]
    assert comparison.values(there, break_even) == pytest.approx(level, abs=1e-9)
    low, high = ttest_1samp(level, 0.0).confidence_interval()
    ratio = as_ratio(comparison.values(there, break_even))
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2 ** np.mean(level), 2**low, 2**high))


def trained(*kl_of_steps):
    return {"books": {"kl_of_steps": dict(zip("1248", ([each] for each in kl_of_steps), strict=True))}}


@pytest.mark.parametrize("bits", [-4.5, -2.25, -0.5, 0.0, 0.75])
def test_where_kl_is_a_square_the_break_even_ratio_earns_what_sensitivity_costs(bits):
    """Within the ratios that were measured, and beyond either end of them."""
    plain, diff = (trained(*(cost * step**2 for step in RATIOS)) for cost in (1.0, 4**-bits))
    assert break_even(diff, plain) == pytest.approx(-bits)
    assert won_at_ratio(8)(diff, plain) == pytest.approx(3 + bits)
