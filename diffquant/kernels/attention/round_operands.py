"""Quantization inside attention: queries and keys before Q·Kᵀ, and softmax weights in blocks of keys.

Queries and keys become codes with one scale per token and head. Codes are exact in float16 and bfloat16, so their
products are exact too; the scales multiply the logits. The result is that of `diffquant.attention.operands` with
granularity `row`, or with MX formats, whose power-of-two scales are multiplied into the codes.

Softmax weights become floats with one scale per block of keys: OCP's MX formats and NVFP4. Exponentials differ in the
last bits between devices, so weights at the border between two codes may be rounded either way. Quantized weights are
multiples of a unit that cancels when rows are divided by their sums, chosen so that they fit in float16 and bfloat16:
2^-14 for MX formats, whose scales are powers of two, and the tensor scale, 1 / (448 · 6), for NVFP4, whose block scales
are e4m3 numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.recipe.scheme import Scheme

# Keys per block, mantissa bits, exponent of the smallest normal number, largest number, and the mantissa of a block's
# largest weight from which the scale's exponent is rounded up, or 0 if scales are not powers of two.
BLOCK_FORMATS = {
    "mxfp4": (32, 1, 0, 6.0, 2.0),
    "mxfp4_up": (32, 1, 0, 6.0, 1.75),
    "mxfp6": (32, 3, 0, 7.5, 2.0),
    "mxfp6_up": (32, 3, 0, 7.5, 1.9375),
    "mxfp6_e3m2": (32, 2, -2, 28.0, 2.0),
    "mxfp8": (32, 3, -6, 448.0, 2.0),
    "mxfp8_up": (32, 3, -6, 448.0, 1.75),
    "mxfp8_e5m2": (32, 2, -14, 57344.0, 2.0),
    "nvfp4": (16, 1, 0, 6.0, 0.0),
}
# Inverse of NVFP4's tensor scale if the largest number is 1, and the scale of a block of zeros.
_DIVISOR, _OF_ZEROS = tl.constexpr(448.0 * 6.0), tl.constexpr(0.125)
TOP_EXPONENT = tl.constexpr(14)


@triton.constexpr_function
def floor_log2(number):
    """Return the largest integer e with 2^e at most `number`, which is at least 1."""
    exponent = 0
    while 2.0 ** (exponent + 1) <= number:
        exponent += 1
    return exponent


@triton.constexpr_function
def mantissa_as_integer(number):
    """Return the 23 mantissa bits of a number in [1, 2) as an integer, as float32 stores them."""
    return int((number - 1) * 2**23)


@triton.jit
def round_to_float(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round x ≥ 0 to a float with MANTISSA mantissa bits, half to even; the smallest normal number is 2^LOWEST."""
    binade = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 + LOWEST) << 23)
    # Adding and subtracting 1.5·2^23 times the spacing of floats in a binade rounds to a multiple of the spacing.
    steps = (binade + (((23 - MANTISSA) << 23) + (1 << 22))).to(tl.float32, bitcast=True)
    return (x + steps) - steps


@triton.jit
def compute_inverse_unit(FORMAT: tl.constexpr):
    """Return the factor of softmax weights in the results of `round_in_blocks` with TOP = TOP_EXPONENT."""
    return 2.0**TOP_EXPONENT if FORMAT[4] > 0 else _DIVISOR


@triton.jit
def round_in_blocks(p, FORMAT: tl.constexpr, TOP: tl.constexpr):
    """Round weights [rows, keys] in [0, 1] to a format of `BLOCK_FORMATS` and return them divided by a unit.

    The unit is 2^-TOP for MX formats and 1 / (448 · 6) for NVFP4. With MX formats and TOP = 0, weights may exceed 1.
    """
    SIZE: tl.constexpr = FORMAT[0]
    ROWS: tl.constexpr = p.shape[0]
    KEYS: tl.constexpr = p.shape[1]
    blocks = p.reshape(ROWS, KEYS // SIZE, SIZE)
    largest = tl.max(blocks, 2)
    if FORMAT[4] > 0:
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - floor_log2(FORMAT[3])
        if FORMAT[4] < 2.0:
            exponent += ((bits & 0x7FFFFF) >= mantissa_as_integer(FORMAT[4])).to(tl.int32)
        exponent = tl.maximum(exponent, 1)
        # Both are powers of two, so products with them are exact.
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = ((exponent + TOP) << 23).to(tl.float32, bitcast=True)
        ratio = blocks * inverse[:, :, None]
    else:
        # 448 is the largest e4m3 number, and the largest weight is 1.
        unit = round_to_float(largest * 448.0, 3, -6)
        unit = tl.where(unit == 0, _OF_ZEROS, unit)
        inverse = 448.0 * 6.0 / unit
        ratio = blocks * inverse[:, :, None]
    levels = tl.minimum(round_to_float(ratio, FORMAT[1], FORMAT[2]), FORMAT[3])
    return (levels * unit[:, :, None]).reshape(ROWS, KEYS)


_TOKENS, _LARGEST_TILE = 32, 128
# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = tl.constexpr(12582912.0)


def operands_refusal(scheme: Scheme) -> str | None:
    """Return why the kernel cannot quantize queries and keys with a scheme, or None if it can."""
    if scheme.transforms:
        return f"the transform {scheme.transforms[0].name} is not supported"
    if (known := BLOCK_FORMATS.get(scheme.format.name)) is not None:
        # NVFP4 has a second scale for the whole tensor.
        return None if known[4] else "the kernel supports MX formats, integers and e4m3"
    if scheme.granularity != "row":
        return f"one scale per {scheme.granularity} is not supported; the kernel supports row"
    return None if scheme.format.name == "e4m3" else scheme.format.integer_refusal


def quantize_per_token(x: Sequence[Tensor], scheme: Scheme) -> tuple[list[Tensor], Tensor]:
    """Quantize queries or keys with one scale per token and head.

    Args:
        x: one [B, H, T, d] per map.
        scheme: scheme that `operands_refusal` does not refuse.

    Returns:
        Codes of each map, contiguous and in the dtype of `x`, and their scales, float32 [B, H, maps, T]. The memory of
        the scales continues after the last one, so that kernels may read a whole tile's scales.
    """
    batch, heads, tokens, width = x[0].shape
    codes = [each.new_empty(each.shape) for each in x]
    shape = batch, heads, len(x), tokens
    steps = torch.empty(prod(shape) + _LARGEST_TILE, device=x[0].device)[: prod(shape)].view(shape)
    for own, (each, of_each) in enumerate(zip(x, codes, strict=True)):
        quantize_token_tile[(triton.cdiv(tokens, _TOKENS) * batch * heads,)](
            each, of_each, steps[:, :, own], each.stride()[:3], heads, tokens, len(x) * tokens,
            FLOAT=scheme.format.name == "e4m3", BLOCKS=BLOCK_FORMATS.get(scheme.format.name),
            LARGEST=float(scheme.format.largest), D=width, ROWS=_TOKENS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, steps


@triton.jit(do_not_specialize=["tokens", "step_stride"])
def quantize_token_tile(
    x, codes, steps, x_strides, heads, tokens, step_stride,
    FLOAT: tl.constexpr, BLOCKS: tl.constexpr, LARGEST: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS tokens of one head; the scales of two heads are `step_stride` apart."""
    tiles = tl.cdiv(tokens, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    inside, channel = token < tokens, tl.arange(0, D)[None, :]
    at = x + head // heads * x_strides[0] + head % heads * x_strides[1] + token.to(tl.int64)[:, None] * x_strides[2]
    rows = tl.load(at + channel, mask=inside[:, None], other=0.0).to(tl.float32)
    magnitudes = tl.abs(rows)
    if BLOCKS is not None:
        step = tl.full([ROWS], 1.0, tl.float32)
        rounded = round_in_blocks(magnitudes, BLOCKS, 0)
    else:
        step = tl.div_rn(tl.max(magnitudes, 1), tl.full([ROWS], LARGEST, tl.float32))
        step = tl.where(step == 0.0, 1.0, step)
        rounded = tl.div_rn(magnitudes, tl.broadcast_to(step[:, None], [ROWS, D]))
        rounded = round_to_float(rounded, 3, -6) if FLOAT else (rounded + _ROUND) - _ROUND
        rounded = tl.minimum(rounded, LARGEST)
    rounded = tl.where(rows < 0, -rounded, rounded)
    out = codes + (head * tokens + token)[:, None] * D + channel
    tl.store(out, rounded.to(codes.dtype.element_ty), mask=inside[:, None])
    tl.store(steps + head * step_stride + token, step, mask=inside)
