"""y = x · Wᵀ for a few tokens: weights stream once, unpacked for the tensor cores (Triton).

A block computes 16 outputs; its warps share K, and their sums meet in shared memory in a fixed order. A warp
loads a fragment's words as its threads need them, and x straight into the threads' registers, so
that its loop has neither shared memory nor barriers. Codes are exact in the products; group scales
multiply float32 sums.
"""

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.configs import GEMV, choose, device_class
from diffquant.kernels.repack import FRAGMENT, PackedWeight, fields
from diffquant.kernels.unpacking import assembly, unpack_field

MOST_TOKENS = 16


def launch_gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] with contiguous rows, M up to 16 -> [M, N]."""
    tokens, width = x.shape
    blocks, chunks, _ = weight.low.shape
    config = choose(GEMV, f"gemv/{device_class(x.device)}/{weight.bits}")
    unroll = _unroll(chunks, config.warps, config.unroll)
    y = x.new_empty(tokens, weight.shape[0])
    _gemv[(blocks, 1)](
        x,
        weight.low,
        weight.high,
        weight.scales,
        weight.row_scale,
        bias,
        y,
        tokens,
        weight.shape[0],
        width,
        blocks,
        chunks,
        x.stride(0),
        int(len(weight.row_scale) > 1),
        bits=weight.bits,
        fields=fields(weight.bits),
        group=weight.group,
        span=gcd(weight.group // FRAGMENT, fields(weight.bits)),
        asm=assembly(weight.bits, x.dtype),
        tiles=triton.cdiv(tokens, 8),
        warps=config.warps,
        unroll=unroll,
        even=chunks % (config.warps * unroll) == 0 and width % (FRAGMENT * fields(weight.bits)) == 0,
        num_warps=config.warps,
        num_stages=1,
    )
    return y


def _unroll(chunks: int, warps: int, most: int) -> int:
    """Chunks a warp has under way at once: the most that leave no remainder, which would need masks."""
    whole = [n for n in range(1, most + 1) if chunks % (warps * n) == 0]
    return max(whole, default=min(most, triton.cdiv(chunks, warps)))


@triton.jit(do_not_specialize=["row_scale_stride"])
def _gemv(
    x,
    low,
    high,
    scales,
    row_scale,
    bias,
    y,
    M,
    N,
    K,
    blocks,
    chunks,
    x_stride,
    row_scale_stride,
    bits: tl.constexpr,
    fields: tl.constexpr,
    group: tl.constexpr,
    span: tl.constexpr,
    asm: tl.constexpr,
    tiles: tl.constexpr,
    warps: tl.constexpr,
    unroll: tl.constexpr,
    even: tl.constexpr,
):
    block = tl.program_id(0)
    # Always 1. Were it known to be, a thread would load more at once than its fragment takes.
    one = tl.num_programs(1)
    chunk_width: tl.constexpr = 16 * fields
    warp = tl.arange(0, warps)
    word = tl.arange(0, 256)
    m = tl.arange(0, tiles * 8)
    # x's elements as [token tile, half o, warp, token of 8, (t, pair)].
    pair = tl.arange(0, 8)
    k = (
        tl.arange(0, 2)[None, :, None, None, None] * 8
        + warp[None, None, :, None, None] * chunk_width
        + (pair // 2 * 2 * one + pair % 2)[None, None, None, None, :]
    )
    token = (tl.arange(0, tiles)[:, None] * 8 + tl.arange(0, 8)[None, :])[:, None, None, :, None]
    live_token = token < M
    x_at = x + token * x_stride + k
    # Scales as [warp, (g, t, half h)]: the four threads t of a row read the same.
    lane = tl.arange(0, 64)
    scale_at = scales + block * 16 + (lane // 8 * 2 + lane % 2)[None, :] if group else scales
    sums = tl.zeros([warps, 16, tiles * 8], tl.float32)
    for first in range(0, chunks, warps * unroll):
        for u in tl.static_range(unroll):
            chunk = first + u * warps + warp
            words_at = (block * chunks + chunk)[:, None] * 256 + word[None, :]
            bytes_at = (block * chunks + chunk)[:, None] * 256 + (word // 8 * 8 * one + word % 8)[None, :]
            live = (chunk < chunks)[:, None]
            low_words = tl.load(low + words_at) if even else tl.load(low + words_at, mask=live, other=0)
            high_words = low_words
            if bits == 6:
                high_words = tl.load(high + bytes_at) if even else tl.load(high + bytes_at, mask=live, other=0)
            start = (first + u * warps) * chunk_width
            part = tl.zeros_like(sums)
            for field in tl.static_range(fields):
                a = unpack_field(low_words, high_words, x.dtype.element_ty, field, bits, asm[0][field])
                a = a.reshape(warps, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(warps, 16, 16)
                mask = live_token if even else live_token & (start + field * 16 + k < K)
                b = tl.load(x_at + start + field * 16, mask=mask, other=0.0)
                b = b.permute(2, 1, 4, 0, 3).reshape(warps, 16, tiles * 8)
                if group == 0:
                    sums = tl.dot(a, b, sums)
                else:
                    part = tl.dot(a, b, part)
                    if (field + 1) % span == 0:
                        # Beyond K, x is 0 and any scale will do.
                        column = (chunk * chunk_width + field * 16)[:, None]
                        scale = tl.load(scale_at + tl.minimum(column, K - 1) // group * blocks * 16)
                        scale = scale.reshape(warps, 8, 4, 2).permute(0, 3, 1, 2)[:, :, :, None, :, None]
                        scale = scale.broadcast_to(warps, 2, 8, tiles, 4, 2).reshape(warps, 16, tiles * 8)
                        sums += part * scale.to(tl.float32)
                        part = tl.zeros_like(sums)
    n = block * 16 + tl.arange(0, 16)
    total = tl.sum(sums, 0) * tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = m[None, :] * N + n[:, None]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
