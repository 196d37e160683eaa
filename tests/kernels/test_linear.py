"""Weight-only linear kernels, interpreted, against float64."""

from dataclasses import replace

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.kernels.linear import gemm, gemv
from diffquant.kernels.linear.gemm import launch_dequantize
from diffquant.kernels.linear.linear import launch_matmul, linear, packed_linear
from diffquant.kernels.linear.repack import dequantize_weight, join_rows, repack, repack_floats
from diffquant.model.linears import QuantizedLinear
from tests.support.packed_weights import (
    exact_weight,
    poison,
    random_activations,
    random_case,
    random_floats,
    random_scale,
    random_words,
    relative_error,
)
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a GPU is")


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    poison(monkeypatch)


CASES = [
    # tokens, rows, columns, bits, group
    (1, 33, 576, 4, 32),
    (1, 16, 1344, 8, 64),
    (3, 17, 2048, 4, 128),
    (3, 48, 576, 6, 64),
    (9, 31, 96, 4, 48),
    (16, 20, 192, 6, 32),
    (16, 40, 1024, 8, "row"),
    (2, 50, 70, 6, "tensor"),
    (17, 33, 576, 4, 32),
    (17, 48, 192, 6, 64),
    (33, 130, 96, 8, 32),
    (100, 47, 320, 4, 16),
    (100, 33, 256, 4, 128),
    (65, 20, 70, 8, "tensor"),
    (40, 16, 576, 6, "row"),
]


@interpreted
@pytest.mark.parametrize("biased", sampled([True, False], 2), ids=["bias", ""])
@pytest.mark.parametrize(("tokens", "rows", "width", "bits", "group"), CASES)
def test_kernels_equal_float64(tokens, rows, width, bits, group, biased):
    packed, exact = random_case(rows, width, bits, group)
    x = random_activations(tokens, width)
    bias = random_activations(1, rows, seed=3)[0] if biased else None
    expected = x.double() @ exact.T + (bias.double() if biased else 0)
    assert relative_error(launch_matmul(x, packed, bias), expected) < 6e-4


FLOATS = ("nvfp4", "mxfp4")


@interpreted
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "width"), [(1, 33, 576), (3, 16, 1344), (9, 31, 96), (17, 20, 352), (40, 130, 192)]
)
def test_kernels_read_floats_under_scales_of_a_byte(tokens, rows, width, dtype, name):
    """In float16 and, to the last bit of what the formats' own decoding gives, in float32."""
    packed, exact = random_floats(rows, width, name)
    x = random_activations(tokens, width).to(dtype)
    assert relative_error(launch_matmul(x, packed, None), x.double() @ exact.T) < (
        6e-4 if dtype == torch.float16 else 1e-6
    )


@interpreted
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(("width", "kind"), [(512, 4), (3072, 4), (1536, "nvfp4"), (4096, "mxfp4")])
def test_words_asked_for_ahead_change_no_bit(width, kind, tokens, monkeypatch):
    """Programs of several row blocks, which a device has where blocks are more than it holds at once."""
    packed, exact = random_case(83, width, 4, 128) if kind == 4 else random_floats(83, width, kind)
    x = random_activations(tokens, width)
    at_once = launch_matmul(x, packed, None)
    programs = []
    monkeypatch.setattr(gemv, "multiprocessors", lambda _: programs.append(1) or 1)
    ahead = launch_matmul(x, packed, None)
    assert programs
    assert torch.equal(ahead, at_once)
    assert relative_error(ahead, x.double() @ exact.T) < 6e-4


@interpreted
@in_one_test("name", FLOATS)
def test_floats_are_written_out_as_the_formats_decode_them(name):
    packed, exact = random_floats(37, 192, name)
    assert relative_error(dequantize_weight(packed, torch.float64), exact) < 1e-7
    assert torch.equal(launch_dequantize(packed, torch.float16), dequantize_weight(packed, torch.float16))
    both = join_rows(random_floats(32, 192, name, seed=1)[0], replace(packed, row_scale=8 * packed.row_scale))
    assert relative_error(launch_dequantize(both, torch.float32)[32:], 8 * exact) < 1e-7


def test_scales_far_below_the_largest_keep_their_place_in_float16():
    words, scale = torch.full((16, 16), 0x77, dtype=torch.uint8), torch.full((16, 1), 3, dtype=torch.uint8)
    scale[1:] = torch.arange(15, dtype=torch.uint8)[:, None] * 2 + 1
    packed = repack_floats(words, scale, None, 32)
    wanted = 6 * torch.exp2(scale.double() - 127).expand(16, 32)
    assert torch.equal(dequantize_weight(packed, torch.float64), wanted)
    # What kernels for many tokens hold: codes times scales.
    assert (dequantize_weight(replace(packed, row_scale=torch.ones(1)), torch.float16) > 0).all()


def test_floats_of_other_shapes_are_refused():
    words, scale = torch.zeros(4, 24, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"E2M1 floats \[4, 48\] .* got \[4, 24\] and scales \[4, 2\]"):
        repack_floats(words, scale, None, 48)


@interpreted
def test_hoppers_order_of_products(monkeypatch):
    monkeypatch.setattr(gemm, "device_class", lambda _: "sm_90")
    for bits, group in ((4, 32), (6, 16), (8, 48)):
        packed, exact = random_case(40, 480, bits, group)
        x = random_activations(20, 480)
        assert relative_error(launch_matmul(x, packed, None), x.double() @ exact.T) < 6e-4


@interpreted
def test_splits_of_k_add_up_in_order(monkeypatch):
    packed, exact = random_case(30, 1100, 4, "row")
    x = random_activations(18, 1100)
    several = launch_matmul(x, packed, None)
    monkeypatch.setattr(gemm, "multiprocessors", lambda _: 1)
    assert relative_error(launch_matmul(x, packed, None), x.double() @ exact.T) < 6e-4
    assert relative_error(several, x.double() @ exact.T) < 6e-4


@interpreted
@in_one_test("tokens", [2, 20])
def test_activations_of_any_strides(tokens):
    packed, exact = random_case(20, 192, 4, 32)
    wide = random_activations(tokens, 2 * 192)
    for x in (wide[:, ::2], wide[:, 5:197], wide.T[:192, :].contiguous().T):
        assert relative_error(launch_matmul(x, packed, None), x.double() @ exact.T) < 6e-4


@interpreted
@pytest.mark.parametrize("tokens", [1, 9, 33])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (6, "tensor"), (8, 64)])
def test_joined_weights_are_one_product(tokens, bits, group):
    """With groups, rows have scales of their own besides."""
    (first, exact_first), (second, exact_second) = (random_case(rows, 192, bits, group, seed=rows) for rows in (32, 21))
    x = random_activations(tokens, 192)
    joined = join_rows(first, replace(second, row_scale=8 * second.row_scale))
    expected = x.double() @ torch.cat([exact_first, 8 * exact_second]).T
    assert relative_error(launch_matmul(x, joined, None), expected) < 6e-4
    assert relative_error(launch_dequantize(joined, torch.float32), torch.cat([exact_first, 8 * exact_second])) < 1e-6


@interpreted
def test_padding_reads_nothing_beyond_the_weight():
    """What lies behind every tensor is NaN, or as integers all ones."""

    def cornered(x):
        if x is None:
            return None
        room = torch.full((2 * x.numel(),), torch.nan if x.is_floating_point() else -1, dtype=x.dtype)
        room[: x.numel()] = x.flatten()
        return room[: x.numel()].view(x.shape)

    for tokens in (3, 20):
        for bits in (4, 6, 8):
            packed, exact = random_case(35, 96, bits, 32)
            x = cornered(random_activations(tokens, 96))
            held = QuantizedLinear(packed)
            for name in ("low", "high", "scales", "row_scale"):
                setattr(held, name, cornered(getattr(packed, name)))
            assert relative_error(launch_matmul(x, held.packed, None), x.double() @ exact.T) < 6e-4


@interpreted
@in_one_test(("bits", "group"), [(4, 32), (4, 48), (6, "row"), (8, 16), (3, "tensor"), (5, 64)])
def test_expanded_weights_are_the_checkpoints(bits, group):
    width = 192 if group != 48 else 144
    packed, _ = random_case(37, width, bits, group)
    assert torch.equal(launch_dequantize(packed, torch.float16), dequantize_weight(packed, torch.float16))


@in_one_test("bits", range(2, 9))
def test_linear_is_the_readers_weight_in_a_matmul_elsewhere(bits):
    words, scale = random_words(24, 96, bits), random_scale(24, 96, 32, torch.float32)
    packed, bias = repack(words, scale, bits, 96), torch.randn(24)
    x = torch.randn(2, 3, 96)
    expected = torch.nn.functional.linear(x.double(), exact_weight(words, scale, bits, 96), bias.double())
    torch.testing.assert_close(linear(x, packed, bias).double(), expected, rtol=1e-5, atol=1e-5)
    assert linear(x[0, 0], packed).shape == (24,)
    assert linear(x[:0], packed).shape == (0, 3, 24)


def test_the_op_passes_opcheck():
    for bits, group in ((4, 32), (6, "row")):
        p, _ = random_case(24, 96, bits, group, torch.float32)
        arguments = (torch.randn(2, 3, 96), p.low, p.high, p.scales, p.row_scale, torch.randn(24), p.bits, p.group, 24)
        torch.library.opcheck(packed_linear, arguments)


def test_a_compiled_model_has_no_graph_break():
    layer = QuantizedLinear(random_case(24, 96, 4, 32, torch.float32)[0])
    x = torch.randn(3, 96)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(compiled(x[:2]), layer(x[:2]))


def test_what_cannot_be_is_refused():
    packed, _ = random_case(24, 96, 4, 32)
    x = random_activations(2, 96)
    with pytest.raises(UsageError, match=r"weight \[24, 96\]: x is \[2, 95\], not \[\.\.\., 96\]"):
        linear(x[:, 1:], packed)
    with pytest.raises(UsageError, match=r"x is torch\.float32 and the weight's scales are torch\.float16; bias is"):
        linear(x.float(), packed, x[0])
