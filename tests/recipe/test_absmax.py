import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diffquant.errors import NonFiniteError, UsageError
from diffquant.recipe.numbers.absmax import check_finite, max_code
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.sharing import Granularity
from tests.support.fake_quantizer import fake_quantize
from tests.support.tables import in_one_test

INTEGERS = st.integers(2, 8).map(lambda bits: format_named(str(bits)))
MATRICES = hnp.arrays("float32", (4, 24), elements=st.floats(-(2.0**99), 2.0**99, width=32)).map(torch.from_numpy)
SHARINGS = st.sampled_from(["tensor", "head", "row", "g8", "column", "c2"]).map(Granularity.parse)


@given(MATRICES, INTEGERS, SHARINGS)
@example(torch.full((4, 24), 2.97e-43), format_named("7"), Granularity.parse("tensor"))
def test_error_is_at_most_half_a_step(x, integers, shared):
    # A subnormal scale is itself rounded, by up to half of the smallest number there is.
    of_scale = integers.largest * 2.0**-150
    view, dim = shared.view(x)
    scale = integers.compute_scale(view, dim)
    back = integers.decode(integers.encode(view, scale), scale)
    assert ((back.double() - view.double()).abs() <= scale.double() / 2 * (1 + 1e-5) + of_scale + 1e-44).all()


@given(MATRICES, INTEGERS, SHARINGS)
def test_codes_stay_within_range_and_the_largest_entry_gets_the_largest_code(x, integers, shared):
    view, dim = shared.view(x)
    scale = integers.compute_scale(view, dim)
    codes = integers.encode(view, scale)
    assert codes.abs().max() <= integers.largest
    reached = codes.abs().amax(dim, keepdim=True)
    assert ((reached == integers.largest) | (view.abs().amax(dim, keepdim=True) < 1e-36)).all()


@given(MATRICES, INTEGERS)
def test_quantizing_again_gives_the_same_codes(x, integers):
    scale = integers.compute_scale(x, -1)
    codes = integers.encode(x, scale)
    back = integers.decode(codes, scale)
    assert torch.equal(integers.encode(back, integers.compute_scale(back, -1)), codes)


@given(MATRICES, INTEGERS)
def test_codes_are_monotone_in_the_values(x, integers):
    row = x.flatten().sort().values
    codes = integers.encode(row, integers.compute_scale(row, -1))
    assert (codes.int().diff() >= 0).all()


@given(MATRICES, INTEGERS)
def test_negating_the_values_negates_the_codes(x, integers):
    scale = integers.compute_scale(x, -1)
    assert torch.equal(integers.encode(-x, integers.compute_scale(-x, -1)), -integers.encode(x, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_zeros_negative_zeros_and_subnormals_give_zero_not_nan(dtype, bits):
    smallest = torch.finfo(dtype).smallest_normal / 16
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0], [smallest, -smallest, 0.0, 0.0]], dtype=dtype)
    back = fake_quantize(x, bits, "row")
    assert back.dtype == dtype
    assert torch.isfinite(back).all()
    assert torch.equal(back[0].abs(), torch.zeros(4, dtype=dtype))


@in_one_test("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_finite_value_survives(dtype):
    largest = torch.finfo(dtype).max
    back = fake_quantize(torch.tensor([[largest, -largest, 0.0]], dtype=dtype), 4, "row")
    torch.testing.assert_close(back, torch.tensor([[largest, -largest, 0.0]], dtype=dtype))


@in_one_test("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = format_named("6")
    scale = integers.compute_scale(x, -1)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, integers.compute_scale(x.float(), -1))
    stored = scale.to(dtype)
    assert torch.equal(integers.encode(x, stored), integers.encode(x.float(), stored.float()))


def test_halfway_values_round_to_even():
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert format_named("4").encode(x, torch.ones(1, 1)).tolist() == [[7, 0, 2, 2, 0, -2]]


@in_one_test("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_by_name_and_place(bad):
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    x[1, 2] = x[2, 3] = bad
    with pytest.raises(NonFiniteError, match=r"layers\.0\.q_proj.*\[3, 4\] holds 2 NaN.*at \[1, 2\]"):
        check_finite(x, "layers.0.q_proj")


@in_one_test("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_whose_sum_is_not_are_finite(dtype):
    check_finite(torch.full((8,), torch.finfo(dtype).max, dtype=dtype), "layers.0.q_proj")


def test_an_unknown_granularity_is_refused():
    with pytest.raises(UsageError, match="unknown granularity 'rows'; did you mean 'row'"):
        Granularity.parse("rows")


def test_what_shares_scales_of_logits_alone_is_no_part_of_one_tensor():
    with pytest.raises(UsageError, match="'pair' spans more than one tensor"):
        Granularity.parse("pair").view(torch.ones(2, 8))


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="5 does not divide"):
        fake_quantize(torch.ones(2, 8), 4, "group", 5)


@in_one_test("bits", [1, 9, 16])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(UsageError, match="bits must be 2 to 8"):
        max_code(bits)
