"""y = x · Wᵀ for many tokens: weights unpacked in registers, from where the tensor cores take them (Triton).

A tile is computed transposed, W · xᵀ: Hopper's and Ampere's products take their left side from registers in
just the order of `repack`, so that unpacked weights never pass through shared memory. Where tiles are fewer than
processors, K is split among blocks and a second kernel adds the parts in order.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.configs import GEMM, choose, device_class, processors
from diffquant.kernels.repack import FRAGMENT, PackedWeight, fields
from diffquant.kernels.unpacking import assembly, multiply, unpack_field

_ADD_WIDTH = 256
# A split has at least so many chunks: its part is written and read again in float32.
_LEAST_CHUNKS = 4


def launch_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] with contiguous rows -> [M, N]."""
    tokens, width = x.shape
    rows = weight.shape[0]
    blocks, chunks, _ = weight.low.shape
    kind = device_class(x.device)
    config = choose(GEMM, f"gemm/{kind}/{_size(tokens)}")
    tiles = triton.cdiv(tokens, config.tokens), triton.cdiv(rows, config.rows)
    splits = max(1, min(processors(x.device) // (tiles[0] * tiles[1]), chunks // _LEAST_CHUNKS))
    y = x.new_empty(tokens, rows)
    parts = y if splits == 1 else x.new_empty(splits, tokens, rows, dtype=torch.float32)
    chunk_width = FRAGMENT * fields(weight.bits)
    _gemm[(*tiles, splits)](
        x,
        weight.low,
        weight.high,
        weight.scales,
        weight.row_scale,
        bias,
        parts,
        tokens,
        rows,
        width,
        blocks,
        chunks,
        triton.cdiv(chunks, splits),
        x.stride(0),
        int(len(weight.row_scale) > 1),
        bits=weight.bits,
        fields=fields(weight.bits),
        group=weight.group,
        span=gcd(weight.group // FRAGMENT, fields(weight.bits)),
        asm=assembly(weight.bits, x.dtype),
        block_count=config.rows // FRAGMENT,
        block_m=config.tokens,
        joined=kind == "sm_90",
        even=width % chunk_width == 0,
        final=splits == 1,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        _add[(tokens, triton.cdiv(rows, _ADD_WIDTH))](
            parts,
            weight.row_scale,
            bias,
            y,
            tokens * rows,
            rows,
            splits,
            int(len(weight.row_scale) > 1),
            width=_ADD_WIDTH,
            num_warps=4,
        )
    return y


def _size(tokens: int) -> int:
    return 32 if tokens <= 32 else 64 if tokens <= 64 else 128


@triton.jit
def _spread(scales_at, live, group: tl.constexpr, blocks, k, K, like):
    """Scales of the group of column k (of the last one, beyond it), for every word of the row blocks."""
    count: tl.constexpr = like.shape[0]
    if group == 0:
        return scales_at
    scale = tl.load(scales_at + tl.minimum(k, K - 1) // group * blocks * 16, mask=live, other=0.0)
    return scale.reshape(count, 32, 1, 2, 1).broadcast_to(count, 32, 2, 2, 2).reshape(count, 256)


@triton.jit
def _weights(low, high, scale, dtype: tl.constexpr, field: tl.constexpr, bits: tl.constexpr, group: tl.constexpr, asm):
    """Weights of a field, [row blocks, 256]."""
    a = unpack_field(low, high, dtype, field, bits, asm[0][field])
    return multiply(a, scale, asm[1]) if group else a


@triton.jit
def _product(a, x_at, live, k, K, even: tl.constexpr, sums):
    """Add a field's product with its 16 columns of x."""
    count: tl.constexpr = a.shape[0]
    a = a.reshape(count, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(count * 16, 16)
    column = k + tl.arange(0, 16)[None, :]
    b = tl.load(x_at + column, mask=live if even else live & (column < K), other=0.0)
    return tl.dot(a, b.T, sums)


@triton.jit(do_not_specialize=["row_scale_stride"])
def _gemm(
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
    chunks_a_split,
    x_stride,
    row_scale_stride,
    bits: tl.constexpr,
    fields: tl.constexpr,
    group: tl.constexpr,
    span: tl.constexpr,
    asm: tl.constexpr,
    block_count: tl.constexpr,
    block_m: tl.constexpr,
    joined: tl.constexpr,
    even: tl.constexpr,
    final: tl.constexpr,
):
    block_n: tl.constexpr = block_count * 16
    chunk_width: tl.constexpr = 16 * fields
    split = tl.program_id(2)
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    block = tl.program_id(1) * block_count + tl.arange(0, block_count)
    live_block = (block < blocks)[:, None]
    word = tl.arange(0, 256)
    lane = tl.arange(0, 64)
    dtype: tl.constexpr = x.dtype.element_ty
    live_token = (m < M)[:, None]
    x_at = x + m.to(tl.int64)[:, None] * x_stride
    words_at = block[:, None] * chunks * 256 + word[None, :]
    scales_at = scales + block[:, None] * 16 + (lane // 8 * 2 + lane % 2)[None, :] if group else scales
    sums = tl.zeros([block_n, block_m], tl.float32)
    for chunk in range(split * chunks_a_split, tl.minimum(chunks, (split + 1) * chunks_a_split)):
        low_words = tl.load(low + words_at + chunk * 256, mask=live_block, other=0)
        high_words = low_words
        if bits == 6:
            high_words = tl.load(high + words_at + chunk * 256, mask=live_block, other=0)
        k = chunk * chunk_width
        scale = _spread(scales_at, live_block, group, blocks, k, K, low_words)
        a0 = _weights(low_words, high_words, scale, dtype, 0, bits, group, asm)
        if span == 1:
            scale = _spread(scales_at, live_block, group, blocks, k + 16, K, low_words)
        a1 = _weights(low_words, high_words, scale, dtype, 1, bits, group, asm)
        if fields == 4:
            if span != 4:
                scale = _spread(scales_at, live_block, group, blocks, k + 32, K, low_words)
            a2 = _weights(low_words, high_words, scale, dtype, 2, bits, group, asm)
            if span == 1:
                scale = _spread(scales_at, live_block, group, blocks, k + 48, K, low_words)
            a3 = _weights(low_words, high_words, scale, dtype, 3, bits, group, asm)
        if joined:
            if fields == 4:
                a = tl.join(tl.join(a0, a1), tl.join(a2, a3)).reshape(block_count, 8, 4, 2, 2, 2, 2, 2)
                a = a.permute(0, 4, 1, 7, 6, 3, 2, 5).reshape(block_n, 64)
            else:
                a = tl.join(a0, a1).reshape(block_count, 8, 4, 2, 2, 2, 2)
                a = a.permute(0, 4, 1, 6, 3, 2, 5).reshape(block_n, 32)
            column = k + tl.arange(0, chunk_width)[None, :]
            b = tl.load(x_at + column, mask=live_token if even else live_token & (column < K), other=0.0)
            sums = tl.dot(a, b.T, sums)
        else:
            sums = _product(a0, x_at, live_token, k, K, even, sums)
            sums = _product(a1, x_at, live_token, k + 16, K, even, sums)
            if fields == 4:
                sums = _product(a2, x_at, live_token, k + 32, K, even, sums)
                sums = _product(a3, x_at, live_token, k + 48, K, even, sums)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    y_at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    live = live_token & (n < N)[None, :]
    if final:
        sums *= tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_at, sums.T.to(y.dtype.element_ty), mask=live)
    else:
        tl.store(y_at + split.to(tl.int64) * M * N, sums.T, mask=live)


@triton.jit(do_not_specialize=["row_scale_stride"])
def _add(parts, row_scale, bias, y, part_stride, N, splits, row_scale_stride, width: tl.constexpr):
    """y [M, N] from the sums of `splits` parts [splits, M, N]."""
    n = tl.program_id(1) * width + tl.arange(0, width)
    live = n < N
    at = tl.program_id(0).to(tl.int64) * N + n
    total = tl.zeros([width], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split.to(tl.int64) * part_stride + at, mask=live, other=0.0)
    total *= tl.load(row_scale + n * row_scale_stride, mask=live, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live)
