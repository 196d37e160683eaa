"""Queries and keys rounded to codes, a scale a token and head, before a kernel multiplies the codes.

Half types hold the codes exactly, so that products of them are exact too; the scales multiply the logits. It is what
`diffquant.attention.operands` computes for `row`, and for MX formats, whose scales are powers of two and stay in the
numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.attention.weight_blocks import BLOCK_FORMATS, rounded_in_blocks, to_float
from diffquant.scheme import Scheme

_TOKENS, _LARGEST_TILE = 32, 128
# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = tl.constexpr(12582912.0)


def operands_refusal(scheme: Scheme) -> str | None:
    """Reason why queries and keys cannot be rounded to a scheme in the kernel, or None."""
    if scheme.rotated or scheme.smooth or scheme.smoothq:
        return "transforms are not served"
    if (known := BLOCK_FORMATS.get(scheme.format.name)) is not None:
        # NVFP4's second scale is the whole tensor's.
        return None if known[4] else "the kernel takes MX formats, integers and e4m3"
    if scheme.granularity != "row":
        return f"one scale a {scheme.granularity} is not served; the kernel takes row"
    return None if scheme.format.name == "e4m3" else scheme.format.integer_refusal


def rounded_rows(x: Sequence[Tensor], scheme: Scheme) -> tuple[list[Tensor], Tensor]:
    """Codes of each map's [B, H, T, d], contiguous and in its dtype, and their scales, float32 [B, H, maps, T].

    Behind the last of the scales there is room for a tile's.
    """
    batch, heads, tokens, width = x[0].shape
    codes = [each.new_empty(each.shape) for each in x]
    shape = batch, heads, len(x), tokens
    steps = torch.empty(prod(shape) + _LARGEST_TILE, device=x[0].device)[: prod(shape)].view(shape)
    for own, (each, of_each) in enumerate(zip(x, codes, strict=True)):
        round_rows[(triton.cdiv(tokens, _TOKENS) * batch * heads,)](
            each, of_each, steps[:, :, own], each.stride()[:3], heads, tokens, len(x) * tokens,
            FLOAT=scheme.format.name == "e4m3", BLOCKS=BLOCK_FORMATS.get(scheme.format.name),
            LARGEST=float(scheme.format.largest), D=width, ROWS=_TOKENS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, steps


@triton.jit(do_not_specialize=["tokens", "step_stride"])
def round_rows(
    x, codes, steps, x_strides, heads, tokens, step_stride,
    FLOAT: tl.constexpr, BLOCKS: tl.constexpr, LARGEST: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes of ROWS tokens of one head, and their scales; those of a head are `step_stride` apart."""
    tiles = tl.cdiv(tokens, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    inside, channel = token < tokens, tl.arange(0, D)[None, :]
    at = x + head // heads * x_strides[0] + head % heads * x_strides[1] + token.to(tl.int64)[:, None] * x_strides[2]
    rows = tl.load(at + channel, mask=inside[:, None], other=0.0).to(tl.float32)
    magnitudes = tl.abs(rows)
    if BLOCKS is not None:
        step = tl.full([ROWS], 1.0, tl.float32)
        rounded = rounded_in_blocks(magnitudes, BLOCKS, 0)
    else:
        step = tl.div_rn(tl.max(magnitudes, 1), tl.full([ROWS], LARGEST, tl.float32))
        step = tl.where(step == 0.0, 1.0, step)
        rounded = tl.div_rn(magnitudes, tl.broadcast_to(step[:, None], [ROWS, D]))
        rounded = to_float(rounded, 3, -6) if FLOAT else (rounded + _ROUND) - _ROUND
        rounded = tl.minimum(rounded, LARGEST)
    rounded = tl.where(rows < 0, -rounded, rounded)
    out = codes + (head * tokens + token)[:, None] * D + channel
    tl.store(out, rounded.to(codes.dtype.element_ty), mask=inside[:, None])
    tl.store(steps + head * step_stride + token, step, mask=inside)
