"""Floats under shared scales, as ModelOpt and torchao quantize them, bit by bit.

Both have rules of their own beside OCP's for the exponent of a block, and for ties; what they share is compared.
"""

import pytest
import torch

from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.sharing import Granularity
from tests.support.float_blocks import blocks, decoded
from tests.support.oracles import agrees
from tests.support.tables import in_one_test

# What shares a scale of a weight [96, 64], and ModelOpt's and torchao's words for it.
SHARED = {
    "tensor": ({"axis": None}, [96, 64]),
    "row": ({"axis": 0}, [1, 64]),
    "g32": ({"block_sizes": {-1: 32}}, [1, 32]),
    "b32": ({"block_sizes": {-1: 32, -2: 32}}, [32, 32]),
}
NEEDED = "needs the extra quantizers"


def weight():
    return blocks(64, count=96)


def ours(name, shared):
    """Codes [96, 64] as numbers, and scales, of that weight."""
    sharing, number_format = Granularity.parse(shared, "weights"), format_named(name)
    view, dim = sharing.view(weight())
    scale = number_format.compute_scale(view, dim)
    levels = number_format.levels_of(number_format.encode(view, scale), torch.float32)
    return sharing.undo_view(levels, (96, 64)), scale


@in_one_test("shared", SHARED)
def test_e4m3_is_quantized_as_modelopt_quantizes_it(shared):
    peer = pytest.importorskip("modelopt.torch.quantization.qtensor", reason=NEEDED)
    levels, scale = ours("e4m3", shared)
    tensor, theirs = peer.FP8QTensor.quantize(weight(), **SHARED[shared][0])
    # It divides a block of zeros by zero.
    agrees("ModelOpt", "e4m3: scales", scale.flatten(), theirs.flatten().masked_fill(theirs.flatten() == 0, 1))
    agrees("ModelOpt", "e4m3: codes", levels, tensor._quantized_data.float().nan_to_num(0))


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_floats_of_eight_bits_are_quantized_as_torchao_quantizes_them(name, dtype, shared):
    peer = pytest.importorskip("torchao.quantization.quant_primitives", reason=NEEDED)
    levels, scale = ours(name, shared)
    theirs = peer._choose_scale_float8(weight(), SHARED[shared][1], dtype)
    codes = peer._quantize_affine_float8(weight(), theirs, dtype).float().nan_to_num(0)
    agrees("torchao", f"{name}: scales", scale.flatten(), theirs.flatten().masked_fill(theirs.flatten() == 0, 1))
    agrees("torchao", f"{name}: codes", levels, codes)


@in_one_test("name", ["mxfp4", "mxfp8"])
def test_microscaled_codes_are_those_of_modelopt_under_its_exponents(name):
    """Its exponent is the lowest under which nothing is clipped, a third rule beside the floor and OCP's."""
    peer = pytest.importorskip("modelopt.torch.quantization.qtensor", reason=NEEDED)
    x, number_format = blocks(32), format_named(name)
    # 7 would be a tie, which its MXFP4 takes towards zero.
    x[5, 1] = -6.5
    kind = peer.MXFP4QTensor if name == "mxfp4" else peer.MXFP8QTensor
    tensor, exponents = kind.quantize(x, block_size=32) if name == "mxfp4" else kind.quantize(x)
    scale = number_format.unpack_scale(exponents.reshape(-1, 1))
    read = tensor.dequantize(torch.float32, scale=exponents, block_sizes={-1: 32})
    agrees("ModelOpt", f"{name}: values", number_format.decode(number_format.encode(x, scale), scale), read)
    floor = number_format.pack_scale(number_format.compute_scale(x, -1))
    raised = exponents.reshape(-1, 1).int() - floor.int()
    assert set(raised[x.abs().amax(-1, keepdim=True) > 0].tolist()) == {0, 1}
    agrees("ModelOpt", f"{name}: exponents", floor[raised == 0], exponents.reshape(-1, 1)[raised == 0])


def test_nvfp4_is_quantized_as_modelopt_quantizes_it():
    """It multiplies by the tensor's scale where we divide, so the largest magnitude is one for which both are exact."""
    peer = pytest.importorskip("modelopt.torch.quantization.qtensor", reason=NEEDED)
    x = blocks(16).reshape(64, 128)
    x *= 2688 * 2.0**-12 / x.abs().max()
    x[0, 0] = 2688 * 2.0**-12
    tensor, scale, above = peer.NVFP4QTensor.quantize(x.clone(), 16)
    number_format = format_named("nvfp4").with_tensor_scale(x.abs().amax())
    assert float(above) * float(number_format.tensor_scale) == 1
    _, codes, found = decoded(number_format, x.unflatten(-1, (-1, 16)))
    stored = number_format.pack_scale(found)[..., 0]
    # What rounds to no scale has 2^-9 there, zeros 1, and both 2^-3 here as in compressed-tensors.
    has_scale = (scale.float() > 2.0**-9) & (x.unflatten(-1, (-1, 16)).abs().amax(-1) > 0)
    assert has_scale.double().mean() > 0.8
    agrees("ModelOpt", "nvfp4: scales", stored[has_scale], scale.view(torch.uint8)[has_scale])
    theirs = number_format.unpack(tensor._quantized_data.view(torch.uint8), 128).unflatten(-1, (-1, 16))
    agrees("ModelOpt", "nvfp4: codes", codes[has_scale], theirs[has_scale])


@in_one_test("name", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2"])
def test_microscaled_floats_agree_with_torchao_under_the_floor(name):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=NEEDED)
    elements = {
        "mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2",
    }  # fmt: skip
    x = blocks(32)
    scale, data = mx.to_mx(x, elements[name], 32, scaling_mode=mx.ScaleCalculationMode.FLOOR)
    number_format = format_named(name)
    values, codes, ours = decoded(number_format, x)
    packed = number_format.pack_scale(ours).reshape(scale.shape)
    agrees("torchao", f"{name}: scales", packed, scale.view(torch.uint8))
    theirs = mx.to_dtype(data, scale, elements[name], 32, torch.float32)
    agrees("torchao", f"{name}: values", values, theirs)
    assert torch.equal(codes, number_format.encode(x, ours))


def test_nvfp4_agrees_with_torchao():
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=NEEDED)
    x = blocks(16).reshape(64, 128)
    # Its tensor scale is a multiplier, and block scales below 2^-6 are raised to that there.
    multiplier = nv.per_tensor_amax_to_scale(x.abs().amax())
    scale, data = nv.nvfp4_quantize(x, 16, multiplier)
    number_format = format_named("nvfp4").with_tensor_scale(x.abs().amax())
    _, codes, ours = decoded(number_format, x.unflatten(-1, (-1, 16)))
    stored = number_format.pack_scale(ours).reshape(-1)
    normal = scale.view(torch.float8_e4m3fn).float().reshape(-1) > 2.0**-6
    assert normal.double().mean() > 0.4
    agrees("torchao", "nvfp4: scales", stored[normal], scale.view(torch.uint8).reshape(-1)[normal])
    theirs = number_format.unpack(data.view(torch.uint8).reshape(-1, 8), 16)
    agrees("torchao", "nvfp4: codes", codes.reshape(-1, 16)[normal], theirs[normal])
