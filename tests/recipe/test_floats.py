"""Floats of 4, 6 and 8 bits and their block scales, bit by bit those of four other libraries."""

import ml_dtypes
import pytest
import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from diffquant.recipe.numbers.formats import NumberFormat, format_named
from tests.support.float_blocks import blocks, decoded
from tests.support.oracles import agrees
from tests.support.tables import in_one_test

# Elements by the format that has them: ml_dtypes' cast, and torch's where there is one.
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "mxfp6": (ml_dtypes.float6_e2m3fn, None),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, None),
    "nvfp4": (ml_dtypes.float4_e2m1fn, None),
}
MICROSCALED = {"mxfp4_up": 4, "mxfp6_up": 6, "mxfp8_up": 8}


def every_16_bit_number():
    """All finite float16 and bfloat16 numbers, 128,768 of them, in float32."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return torch.cat([x[x.isfinite()] for x in (patterns.view(t).float() for t in (torch.float16, torch.bfloat16))])


@in_one_test("name", ELEMENTS)
def test_every_16_bit_number_is_cast_as_ml_dtypes_and_torch_cast_it(name):
    number_format, x = format_named(name), every_16_bit_number()
    assert len(x) == 63488 + 65280
    theirs, torchs = ELEMENTS[name]
    within = x.clamp(-number_format.largest, number_format.largest)
    oracle = torch.from_numpy(within.numpy().astype(theirs).astype("float32"))
    one = torch.ones(())
    for values in (x, x.double()):
        read = number_format.levels_of(number_format.encode(values, one), torch.float32)
        agrees("ml_dtypes", f"{name}: casts of 16-bit numbers", read, oracle)
        assert torch.equal(number_format.round_to_absmax_levels_(values.clone()), oracle.to(values.dtype))
    # All levels are bfloat16 numbers.
    narrow = x[x.bfloat16() == x].bfloat16()
    assert torch.equal(number_format.round_to_absmax_levels_(narrow.clone()).float(), oracle[x.bfloat16() == x])
    if torchs is not None:
        agrees("torch", f"{name}: casts of 16-bit numbers", read, within.to(torchs).float())


@in_one_test("name", ELEMENTS)
def test_levels_are_all_numbers_of_ml_dtypes_type_and_ties_go_to_an_even_mantissa(name):
    number_format, (theirs, _) = format_named(name), ELEMENTS[name]
    info = ml_dtypes.finfo(theirs)
    assert (number_format.largest, -number_format.lowest) == (float(info.max), float(info.max))
    assert min(level for level in number_format.levels if level > 0) == float(info.smallest_subnormal)
    levels = torch.tensor(number_format.levels, dtype=torch.float64)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = number_format.encode(middles, torch.ones((), dtype=torch.float64))
    assert (codes % 2 == 0).all()
    # The general way, by a table, finds the same.
    assert torch.equal(NumberFormat.encode(number_format, middles, torch.ones((), dtype=torch.float64)), codes)


@in_one_test("name", ELEMENTS)
def test_bytes_are_the_bits_of_ml_dtypes_numbers(name):
    number_format, (theirs, _) = format_named(name), ELEMENTS[name]
    levels = torch.tensor(number_format.levels).repeat(32)[: 32 * (len(number_format.levels) // 2)]
    codes = number_format.encode(levels, torch.ones(()))
    packed = number_format.pack(codes)
    assert torch.equal(number_format.unpack(packed, len(codes)), codes)
    bits = torch.from_numpy(levels.numpy().astype(theirs).view("uint8"))
    # A zero has no sign here.
    bits[levels == 0] = 0
    width = number_format.width
    dense = sum(int(b) << (i * width) for i, b in enumerate(bits))
    oracle = torch.frombuffer(bytearray(dense.to_bytes(len(codes) * width // 8, "little")), dtype=torch.uint8)
    agrees("ml_dtypes", f"{name}: bytes", packed, oracle)


def test_four_bits_are_packed_as_compressed_tensors_packs_them():
    values = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6, 0, -1, 0.5, 0.5, -0.0, 2]])
    number_format = format_named("nvfp4")
    theirs = pack_fp4_to_uint8(values)
    assert theirs.tolist() == [[16, 50, 84, 118, 249, 160, 17, 72 + 0]]
    codes = number_format.unpack(theirs, 16)
    assert torch.equal(number_format.levels_of(codes, torch.float32), values)
    # A minus of zero is not kept.
    assert number_format.pack(codes).tolist() == [[16, 50, 84, 118, 249, 160, 17, 64]]
    every = torch.arange(256, dtype=torch.uint8)[None]
    read = number_format.levels_of(number_format.unpack(every, 512), torch.float32)
    agrees("compressed-tensors", "nvfp4: bytes", read, unpack_fp4_from_uint8(every, 1, 512).float())


def test_six_bits_are_packed_as_compressed_tensors_packs_them():
    number_format = format_named("mxfp6")
    codes = number_format.encode(torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * 3, torch.ones(()))
    values = number_format.levels_of(codes, torch.float32)
    agrees("compressed-tensors", "mxfp6: bytes", number_format.pack(codes), pack_fp6_to_uint8(values))


@in_one_test(("name", "bits"), MICROSCALED.items())
def test_microscaled_floats_agree_with_compressed_tensors(name, bits):
    args = QuantizationArgs(num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    number_format = format_named(name)
    # Every magnitude of 16 bits as the largest of a block, but where their exponent overflows or subnormals begin.
    largest = every_16_bit_number().abs()
    largest = largest[((largest > 2.0**-110) & (largest < 1.75 * 2.0**127)) | (largest == 0)].unique()
    x = largest[:, None] * torch.linspace(-1, 1, 32)
    scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    ours = number_format.compute_scale(x, -1)
    agrees("compressed-tensors", f"{name}: scales", ours, scale)
    assert torch.equal(number_format.unpack_scale(number_format.pack_scale(ours)), ours)
    quantized = quantize(x, scale, None, args)
    theirs = dequantize(quantized, scale, None, args, dtype=torch.float32)
    read = number_format.decode(number_format.encode(x, ours), ours)
    agrees("compressed-tensors", f"{name}: values", read, theirs)


def test_the_shared_exponent_is_the_floor_of_ocp_unless_the_name_says_up():
    largest = torch.tensor([1, 1.74, 1.75, 3.49, 3.5, 6, 7, 0])[:, None]
    exponents = {
        name: format_named(name).pack_scale(format_named(name).scale_for_largest(largest)) for name in FLOORS_AND_UPS
    }
    assert exponents["mxfp4"].flatten().tolist() == [125, 125, 125, 126, 126, 127, 127, 0]
    assert exponents["mxfp4_up"].flatten().tolist() == [125, 125, 126, 126, 127, 127, 128, 0]
    # 1.9375 is where E2M3 would round beyond 7.5.
    assert exponents["mxfp6_up"].flatten().tolist() == [125, 125, 125, 126, 126, 127, 127, 0]
    assert exponents["mxfp8"].flatten().tolist() == [119, 119, 119, 120, 120, 121, 121, 0]
    assert exponents["mxfp8_e5m2"].flatten().tolist() == [112, 112, 112, 113, 113, 114, 114, 0]
    # 7 is clipped to 6 under the floor, and halved under the raised exponent.
    assert decoded(format_named("mxfp4"), torch.tensor([[7.0] * 32]))[0].unique().tolist() == [6]
    assert decoded(format_named("mxfp4_up"), torch.tensor([[7.0] * 32]))[0].unique().tolist() == [8]


FLOORS_AND_UPS = ("mxfp4", "mxfp4_up", "mxfp6_up", "mxfp8", "mxfp8_e5m2")


def test_scales_of_microscaled_floats_are_ml_dtypes_e8m0_in_every_byte():
    number_format = format_named("mxfp4")
    every = torch.arange(255, dtype=torch.uint8)
    scale = number_format.unpack_scale(every)
    oracle = every.numpy().view(ml_dtypes.float8_e8m0fnu).astype("float32")
    agrees("ml_dtypes", "e8m0: scales", scale, torch.from_numpy(oracle))
    assert torch.equal(number_format.pack_scale(scale), every)
    assert number_format.unpack_scale(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@in_one_test("size", [1e-3, 1.0, 300.0])
def test_nvfp4_agrees_with_compressed_tensors_with_and_without_a_tensors_scale(size):
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    x = blocks(16, size)
    for number_format in (format_named("nvfp4"), format_named("nvfp4").with_tensor_scale(x.abs().amax())):
        theirs = None
        if number_format.tensor_scale is not None:
            theirs = generate_gparam(x.amin(), x.amax())
            agrees("compressed-tensors", "nvfp4: scales", number_format.tensor_scale, theirs)
        scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args, theirs)
        values, codes, ours = decoded(number_format, x)
        stored = number_format.pack_scale(ours).view(torch.float8_e4m3fn).float()
        agrees("compressed-tensors", "nvfp4: scales", stored, scale)
        quantized = quantize(x, scale, None, args, global_scale=theirs)
        agrees("compressed-tensors", "nvfp4: levels", number_format.levels_of(codes, torch.float32), quantized)
        read = dequantize(quantized, scale, None, args, global_scale=theirs)
        agrees("compressed-tensors", "nvfp4: values", values, read)
        stored = number_format.pack_scale(ours)
        assert torch.equal(number_format.unpack_scale(stored, number_format.tensor_scale), ours)
    assert format_named("nvfp4").with_tensor_scale(torch.tensor([3.0])).tensor_scale.tolist() == [896]


def test_every_e4m3_scale_comes_back_under_any_tensors_scale():
    every = torch.arange(1, 127, dtype=torch.uint8)
    for largest in 10.0 ** torch.linspace(-30, 30, 500):
        number_format = format_named("nvfp4").with_tensor_scale(largest)
        scale = number_format.unpack_scale(every, number_format.tensor_scale)
        assert torch.equal(number_format.pack_scale(scale), every)
        assert torch.equal(number_format.round_scale(scale, torch.float32), scale)


def test_four_over_six_takes_whichever_of_two_scales_loses_less():
    x = blocks(16).double()
    x[9] = torch.tensor([4.0, 3, 2, 1] * 4) / 7
    number_format = format_named("nvfp4_4over6").with_tensor_scale(x.abs().amax())
    six = format_named("nvfp4").with_tensor_scale(x.abs().amax())
    divisor = 256 * 6 / x.abs().amax()
    assert number_format.tensor_scale.double() == pytest.approx(float(divisor))
    lost = {}
    for top in (4, 6):
        scale = torch.from_numpy(
            (x.abs().amax(-1, keepdim=True) / top * divisor).numpy().astype(ml_dtypes.float8_e4m3fn).astype("float64")
        )
        scale = torch.where(scale == 0, 0.125, scale) / divisor
        levels = torch.from_numpy((x / scale).clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype("float64"))
        lost[top] = (levels * scale - x).square().sum(-1)
    values, _, _ = decoded(number_format, x)
    least = torch.minimum(lost[4], lost[6])
    assert torch.allclose((values - x).square().sum(-1), least, rtol=1e-4, atol=0)
    assert 0.2 < (lost[4] < lost[6]).double().mean() < 0.9
    # 4, 3, 2 and 1 sevenths are levels under a scale of one seventh, as far as e4m3 has that.
    assert (values - x)[9].abs().max() < 0.4 * (decoded(six, x)[0] - x)[9].abs().max()


def test_the_example_of_ocp_microscaling_a_block_under_one_power_of_two():
    # Section 6.3: X = 2^(floor(log2 of the largest) - emax), and elements are rounded to the nearest even, saturating.
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([5.0, 3.5, 2.5, 1.75, -0.25, 0.75, -7.9, 1.25])
    values, _, scale = decoded(format_named("mxfp4"), x)
    assert float(scale) == 1
    assert values[0, :8].tolist() == [4, 4, 2, 2, 0, 1, -6, 1]
    halves, _, scale = decoded(format_named("mxfp4"), x / 1024)
    assert torch.equal(halves * 1024, values)
    assert float(scale) == 2.0**-10


def test_nan_codes_of_eight_bits_are_read_as_nan():
    for name, code in (("e4m3", 0x7F), ("e5m2", 0x7C), ("e5m2", 0xFF)):
        number_format = format_named(name)
        codes = number_format.unpack(torch.tensor([code], dtype=torch.uint8), 1)
        assert number_format.levels_of(codes, torch.float32).isnan().all()
