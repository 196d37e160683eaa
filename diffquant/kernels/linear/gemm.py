"""Product y = x · Wᵀ for many tokens: weights are unpacked in the registers the tensor cores take them from (Triton).

A tile is computed transposed, W · xᵀ: products take their left side from registers in just the order of `repack`,
so that unpacked weights never pass through shared memory. Where tiles are fewer than processors, K is split
among blocks, and a second kernel adds the parts in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.configs import choose
from diffquant.kernels.gpu import device_class, processors
from diffquant.kernels.linear.repack import FRAGMENT, PackedWeight, fields_in_word
from diffquant.kernels.linear.unpacking import chunk_weights, join_fields

_ADDED_AT_ONCE = 256
# Fewest chunks that a split of K is worth: its part is written and read again in float32.
_LEAST_CHUNKS = 4


@dataclass(frozen=True)
class GemmTile:
    """A tile of the kernel.

    Attributes:
        rows: number of rows of W.
        tokens: number of tokens.
        warps: number of warps.
        stages: number of steps loaded ahead.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


# 128 rows give each of 4 warps two fragments a step, on Hopper one warpgroup's; with up to 64 tokens three or
# more blocks share a processor, so that one unpacks while another multiplies. Ampere's warps spill with 128.
TILES = {
    "gemm/sm_90/32": GemmTile(128, 32, 4, 3),
    "gemm/sm_90/64": GemmTile(128, 64, 4, 3),
    "gemm/sm_90/128": GemmTile(128, 128, 4, 3),
    "gemm/sm_80/32": GemmTile(128, 32, 4, 3),
    "gemm/sm_80/64": GemmTile(128, 64, 4, 3),
    "gemm/sm_80/128": GemmTile(128, 64, 4, 3),
}


def launch_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Product [M, N] of x [M, K], contiguous along K, and a packed weight."""
    tokens, width = x.shape
    rows = weight.shape[0]
    blocks, chunks, _ = weight.low.shape
    device_kind = device_class(x.device)
    tile = choose(TILES, f"gemm/{device_kind}/{32 if tokens <= 32 else 64 if tokens <= 64 else 128}")
    tiles = triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, tile.rows)
    splits = max(1, min(processors(x.device) // (tiles[0] * tiles[1]), chunks // _LEAST_CHUNKS))
    y = x.new_empty(tokens, rows)
    parts = y if splits == 1 else x.new_empty(splits, tokens, rows, dtype=torch.float32)
    row_scale_stride = int(len(weight.row_scale) > 1)
    _gemm[(*tiles, splits)](
        x, weight.low, weight.high, weight.scales, weight.row_scale, bias, parts,
        tokens, rows, width, blocks, chunks, triton.cdiv(chunks, splits), x.stride(0), row_scale_stride,
        BITS=weight.bits, FLOATS=weight.holds_floats, FIELDS=fields_in_word(weight.bits), GROUP=weight.group,
        SPAN=gcd(weight.group // FRAGMENT, fields_in_word(weight.bits)),
        BLOCKS=tile.rows // FRAGMENT, TOKENS=tile.tokens, JOINED=device_kind == "sm_90",
        EVEN=width == chunks * FRAGMENT * fields_in_word(weight.bits), FINAL=splits == 1,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _add[(tokens, triton.cdiv(rows, _ADDED_AT_ONCE))](
            parts, weight.row_scale, bias, y, tokens * rows, rows, splits, row_scale_stride, WIDTH=_ADDED_AT_ONCE,
            enable_fp_fusion=True,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "chunks_a_split", "row_scale_stride"])
def _gemm(
    x, low, high, scales, row_scale, bias, y,
    M, N, K, blocks, chunks, chunks_a_split, x_stride, row_scale_stride,
    BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr, JOINED: tl.constexpr, EVEN: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Product of one tile: of y [M, N] or, unless FINAL, of a split's unscaled part of it in y [splits, M, N]."""
    split = tl.program_id(2)
    m = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    live_token = (m < M)[:, None]
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCKS * 16, TOKENS], tl.float32)
    for chunk in range(split * chunks_a_split, tl.minimum(chunks, (split + 1) * chunks_a_split)):
        a0, a1, a2, a3 = chunk_weights(
            low, high, scales, block, blocks, chunk, chunks, K, x.dtype.element_ty, BITS, FLOATS, FIELDS, GROUP, SPAN
        )
        k = chunk * (16 * FIELDS)
        # Hopper's products run side by side if they are one; for Ampere's, joining would change columns' order.
        if JOINED:
            column = k + tl.arange(0, 16 * FIELDS)[None, :]
            b = tl.load(x_at + column, mask=live_token if EVEN else live_token & (column < K), other=0.0)
            sums = tl.dot(join_fields(a0, a1, a2, a3, FIELDS), b.T, sums)
        else:
            sums = _product(a0, x_at, live_token, k, K, EVEN, sums)
            sums = _product(a1, x_at, live_token, k + 16, K, EVEN, sums)
            if FIELDS == 4:
                sums = _product(a2, x_at, live_token, k + 32, K, EVEN, sums)
                sums = _product(a3, x_at, live_token, k + 48, K, EVEN, sums)
    n = tl.program_id(1) * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
    y_at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    live = live_token & (n < N)[None, :]
    if FINAL:
        sums *= tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_at, sums.T.to(y.dtype.element_ty), mask=live)
    else:
        tl.store(y_at + split.to(tl.int64) * M * N, sums.T, mask=live)


@triton.jit
def _product(a, x_at, live, k, K, EVEN: tl.constexpr, sums):
    """Add a field's product with its 16 columns of x."""
    count: tl.constexpr = a.shape[0]
    a = a.reshape(count, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(count * 16, 16)
    column = k + tl.arange(0, 16)[None, :]
    b = tl.load(x_at + column, mask=live if EVEN else live & (column < K), other=0.0)
    return tl.dot(a, b.T, sums)


@triton.jit(do_not_specialize=["part_stride", "splits", "row_scale_stride"])
def _add(parts, row_scale, bias, y, part_stride, N, splits, row_scale_stride, WIDTH: tl.constexpr):
    """Sum y [M, N] of its parts [splits, M, N], scaled."""
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = n < N
    at = tl.program_id(0).to(tl.int64) * N + n
    total = tl.zeros([WIDTH], tl.float32)
    for _ in range(splits):
        total += tl.load(parts + at, mask=live, other=0.0)
        parts += part_stride
    total *= tl.load(row_scale + n * row_scale_stride, mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live)
