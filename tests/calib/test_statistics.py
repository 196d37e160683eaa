"""Streaming statistics against torch.topk and numpy's quantiles of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffquant.calib.calibration.observers import QUANTILE_ERROR, MagnitudeHistogram
from diffquant.errors import NonFiniteError
from tests.support.tables import in_one_test


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 200))
def test_the_largest_are_those_of_the_whole_stream(seed, pieces, kept):
    generator = torch.Generator().manual_seed(seed)
    stream = [torch.randn(3, 17 * (i + 1), generator=generator).exp() for i in range(pieces)]
    magnitudes = MagnitudeHistogram(kept)
    for piece in stream:
        magnitudes.add(piece)
    whole = torch.cat([piece.flatten() for piece in stream])
    assert torch.equal(magnitudes.largest, whole.topk(min(kept, len(whole))).values)


@given(st.integers(0, 2**31), st.floats(1e-12, 1e12), st.sampled_from([0.001, 0.1, 0.5, 0.9, 0.999, 1.0]))
def test_quantiles_lie_within_the_stated_error(seed, size, share):
    values = torch.randn(3001, generator=torch.Generator().manual_seed(seed)).abs().mul(size)
    magnitudes = MagnitudeHistogram()
    for piece in values.split(700):
        magnitudes.add(piece)
    exact = np.quantile(values.double().numpy(), share, method="inverted_cdf")
    assert magnitudes.count == 3001
    assert magnitudes.quantile(share) == pytest.approx(exact, rel=QUANTILE_ERROR, abs=1e-37)
    assert QUANTILE_ERROR <= 0.005


def test_zeros_count_unless_they_are_hidden():
    magnitudes = MagnitudeHistogram()
    magnitudes.add(torch.tensor([0.0, 0.0, 0.0, 5.0, 6.0]), zeros_to_ignore=2)
    assert magnitudes.count == 3
    assert magnitudes.quantile(1 / 3) == 0
    assert magnitudes.quantile(2 / 3) == pytest.approx(5, rel=QUANTILE_ERROR)


@in_one_test("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(NonFiniteError, match="float32"):
        MagnitudeHistogram().add(torch.tensor([1.0, bad]))


def test_the_middle_of_a_bin_is_where_its_values_fall():
    values = MagnitudeHistogram.bin_centers()
    kept = values[1000:30000:97]
    magnitudes = MagnitudeHistogram()
    magnitudes.add(kept)
    assert torch.equal(values[magnitudes.counts.bool()], kept)
