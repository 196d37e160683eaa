import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diffquant.errors import NonFiniteError, UsageError
from diffquant.numbers import absmax_scale, check_finite, dequantize, max_code, quantize, sharing_view
from tests.support.fake_quantizer import fake_quantize

BITS = st.integers(2, 8)
MATRICES = hnp.arrays("float32", (4, 24), elements=st.floats(-(2.0**99), 2.0**99, width=32)).map(torch.from_numpy)
GRANULARITIES = st.sampled_from(
    [("tensor", None), ("head", None), ("row", None), ("group", 8), ("column", None), ("column", 2)]
)


@given(MATRICES, BITS, GRANULARITIES)
def test_error_is_at_most_half_a_step(x, bits, shared):
    view, dim = sharing_view(x, *shared)
    scale = absmax_scale(view, bits, dim)
    back = dequantize(quantize(view, scale, bits), scale)
    assert ((back.double() - view.double()).abs() <= scale.double() / 2 * (1 + 1e-5) + 1e-44).all()


@given(MATRICES, BITS, GRANULARITIES)
def test_codes_stay_within_range_and_the_largest_entry_gets_the_largest_code(x, bits, shared):
    view, dim = sharing_view(x, *shared)
    scale = absmax_scale(view, bits, dim)
    codes = quantize(view, scale, bits)
    assert codes.abs().max() <= max_code(bits)
    reached = codes.abs().amax(dim, keepdim=True)
    assert ((reached == max_code(bits)) | (view.abs().amax(dim, keepdim=True) < 1e-36)).all()


@given(MATRICES, BITS)
def test_quantizing_again_gives_the_same_codes(x, bits):
    scale = absmax_scale(x, bits, -1)
    codes = quantize(x, scale, bits)
    back = dequantize(codes, scale)
    assert torch.equal(quantize(back, absmax_scale(back, bits, -1), bits), codes)


@given(MATRICES, BITS)
def test_codes_are_monotone_in_the_values(x, bits):
    row = x.flatten().sort().values
    codes = quantize(row, absmax_scale(row, bits, -1), bits)
    assert (codes.int().diff() >= 0).all()


@given(MATRICES, BITS)
def test_negating_the_values_negates_the_codes(x, bits):
    scale = absmax_scale(x, bits, -1)
    assert torch.equal(quantize(-x, absmax_scale(-x, bits, -1), bits), -quantize(x, scale, bits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_zeros_negative_zeros_and_subnormals_give_zero_not_nan(dtype, bits):
    smallest = torch.finfo(dtype).smallest_normal / 16
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0], [smallest, -smallest, 0.0, 0.0]], dtype=dtype)
    back = fake_quantize(x, bits, "row")
    assert back.dtype == dtype
    assert torch.isfinite(back).all()
    assert torch.equal(back[0].abs(), torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_finite_value_survives(dtype):
    largest = torch.finfo(dtype).max
    back = fake_quantize(torch.tensor([[largest, -largest, 0.0]], dtype=dtype), 4, "row")
    torch.testing.assert_close(back, torch.tensor([[largest, -largest, 0.0]], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = absmax_scale(x, 6, -1)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, absmax_scale(x.float(), 6, -1))
    stored = scale.to(dtype)
    assert torch.equal(quantize(x, stored, 6), quantize(x.float(), stored.float(), 6))


def test_halfway_values_round_to_even():
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantize(x, torch.ones(1, 1), 4).tolist() == [[7, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("columns", [1, 7, 31])
def test_odd_lengths_quantize(columns):
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    assert (fake_quantize(x, 8, "row") - x).abs().max() <= x.abs().max() / 127 / 2 + 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_by_name_and_place(bad):
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    x[1, 2] = x[2, 3] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.0\.q_proj.*\[3, 4\] holds 2 NaN.*at \[1, 2\]"):
        check_finite(x, "layers.0.q_proj")


def test_values_that_sum_to_infinity_are_not_refused():
    check_finite(torch.full((64,), torch.finfo(torch.float32).max), "huge")


def test_an_unknown_granularity_is_refused():
    with pytest.raises(UsageError, match="'rows' does not name"):
        sharing_view(torch.ones(2, 8), "rows")


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="5 does not divide"):
        fake_quantize(torch.ones(2, 8), 4, "group", 5)


@pytest.mark.parametrize("bits", [1, 9, 16])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(UsageError, match="bits must be 2 to 8"):
        max_code(bits)
