import time

import numpy as np
import pytest
from scipy import stats as scipy_stats

from diffquant.measure.stats import (
    Difference,
    count_flips,
    mcnemar_p_value,
    mean_interval,
    paired_difference,
    recovery,
    standard_error,
    wilson_interval,
)
from tests.support.tables import in_one_test


def paired_bits(n, p_gain, p_lose, rng):
    kind = rng.choice(3, size=n, p=[p_gain, p_lose, 1 - p_gain - p_lose])
    before = np.where(kind == 2, rng.random(n) < 0.4, kind == 1)
    return np.where(kind == 0, True, np.where(kind == 1, False, before)).astype(int), before.astype(int)


def test_the_standard_error_is_scipys():
    values = [1, 0, 0, 1, 1, 0, 1]
    assert standard_error(values) == pytest.approx(scipy_stats.sem(values))
    assert standard_error([1]) is None


def test_the_paired_interval_agrees_with_scipys_bootstrap():
    now, before = paired_bits(500, 0.05, 0.09, np.random.default_rng(1))
    ours = paired_difference(now.tolist(), before.tolist())
    theirs = scipy_stats.bootstrap((now - before,), np.mean, n_resamples=4000, rng=np.random.default_rng(2))
    assert ours.mean == pytest.approx((now - before).mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.004)


@pytest.mark.parametrize(("p_gain", "p_lose"), [(0.0, 0.0), (0.01, 0.01), (0.02, 0.1), (0.15, 0.15)])
@pytest.mark.parametrize("n", [50, 500])
def test_the_paired_interval_covers_the_truth_about_as_often_as_it_says(n, p_gain, p_lose):
    rng = np.random.default_rng(n)
    covered = 0
    for _ in range(400):
        now, before = paired_bits(n, p_gain, p_lose, rng)
        interval = paired_difference(now.tolist(), before.tolist())
        covered += interval.low <= p_gain - p_lose <= interval.high
    assert covered / 400 >= 0.92


def test_the_paired_interval_equals_that_of_the_r_package_contingencytables():
    # Complete response before and after consolidation therapy (Cavo et al. 2012), Wald_CI_BonettPrice_paired_2x2.
    before = [1] * 59 + [0] * 6 + [1] * 16 + [0] * 80
    after = [1] * 59 + [1] * 6 + [0] * 16 + [0] * 80
    interval = paired_difference(after, before)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((-0.0621, -0.1195, -0.0032), abs=5e-5)


def test_the_paired_interval_ends_where_differences_end():
    assert paired_difference([1], [0]).high == 1.0
    assert paired_difference([0], [1]).low == -1.0


def test_lists_of_other_items_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1, 0], [1])
    with pytest.raises(ValueError, match="zip"):
        count_flips([1, 0], [1], [2, 0], [2, 0])
    with pytest.raises(ValueError, match="zip"):
        count_flips([1, 0], [1, 0], [2, 0], [2])


def test_no_flips_are_not_certainty():
    same = [0, 1] * 10
    interval = paired_difference(same, same)
    assert interval.mean == 0
    assert interval.low < -0.05 < 0.05 < interval.high


@in_one_test("n", [2, 3, 4, 16, 17, 200])
def test_values_that_are_not_right_or_wrong_get_students_interval(n):
    a, b = np.random.default_rng(n).normal(size=(2, n))
    interval = paired_difference(a.tolist(), b.tolist())
    expected = scipy_stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_one_value_has_no_bounds():
    alone = mean_interval([0.3])
    assert (alone.mean, alone.low, alone.high) == (0.3, -np.inf, np.inf)
    assert mean_interval([0.0, 0.3, 0.0], [0, 7, 0]) == alone
    assert paired_difference([0.5], [0.2]) == alone


def test_the_interval_of_a_weighted_mean_is_that_of_a_ratio():
    """Weights that do not vary give Student's interval; others agree with the bootstrap of the ratio of two sums."""
    rng = np.random.default_rng(3)
    values, weights = rng.gamma(2, size=400), rng.integers(50, 512, size=400)
    same, plain = mean_interval(values.tolist(), [512] * 400), mean_interval(values.tolist())
    assert (same.low, same.high) == pytest.approx((plain.low, plain.high))
    weighted = mean_interval(values.tolist(), weights.tolist())
    theirs = scipy_stats.bootstrap(
        (values * weights, weights),
        lambda top, bottom: top.sum() / bottom.sum(),
        paired=True,
        vectorized=False,
        rng=rng,
    ).confidence_interval
    assert weighted.mean == pytest.approx(np.average(values, weights=weights))
    assert (weighted.low, weighted.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


@pytest.mark.parametrize("fewer", [0, 1, 7, 300, 4900, 499_000, 499_999])
@pytest.mark.parametrize("more", [0, 1, 2, 20, 700, 5000, 500_000, 501_000])
def test_mcnemars_p_is_scipys_in_no_time(fewer, more):
    started = time.process_time()
    p = mcnemar_p_value(fewer, more)
    assert time.process_time() - started < 1
    assert p == mcnemar_p_value(more, fewer)
    assert p == pytest.approx(scipy_stats.binomtest(fewer, fewer + more).pvalue if fewer + more else 1, rel=1e-11)


def test_flips_count_each_way_and_choices_that_stayed_wrong():
    counted = count_flips([1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1, 1], [2, 2, 0, 3, 1, 1, 1], [1, 1, 2, 0, 1, 1, 1])
    assert counted == (2, 1, 4)


def test_recovery_is_a_ratio_with_the_ends_of_the_difference_and_undefined_from_nothing():
    recovered = recovery(Difference(-0.1, -0.2, 0.04), 0.4)
    assert (recovered.mean, recovered.low, recovered.high) == pytest.approx((0.75, 0.5, 1.1))
    assert recovery(Difference(0.3, 0.1, 0.5), 0.0) is None


@in_one_test(("successes", "n"), [(0, 5), (3, 7), (541, 544), (12, 12)])
def test_the_interval_of_a_share_is_scipys(successes, n):
    interval = scipy_stats.binomtest(successes, n).proportion_ci(0.95, "wilson")
    assert wilson_interval(successes, n) == pytest.approx((interval.low, interval.high))
