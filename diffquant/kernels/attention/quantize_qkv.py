"""Quantization of Q, K and V to 8 bits for attention: two passes over K and V, one over Q, in two launches.

K is smoothed: its mean over a sequence's valid tokens is subtracted, which does not change softmax, so that a constant
offset of a channel does not use up the range of codes. Padding affects neither means nor scales, and blocks of keys are
counted from a sequence's first valid key, so padding changes no result.

Sources: SageAttention (arXiv 2410.02367) for smoothing, SageAttention2 (arXiv 2411.10958) for V in e4m3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.kernels.attention.online import valid_range

# Number of rows of Q, or keys of V, that one program quantizes, and number of keys per step of the statistics.
_ROWS = 64
# Largest number of partial statistics per channel, all of which each program of the second launch has to add.
_CHUNKS = 32
_E4M3_MAX = tl.constexpr(448.0)
# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = tl.constexpr(12582912.0)


# Codes and scales of Q, K and V.
QuantizedQKV = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def quantize_qkv(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    scale: float,
    *,
    tile_rows: int,
    block: int,
    values: bool,
) -> QuantizedQKV:
    """Quantize Q, K and optionally V to 8 bits.

    Args:
        q: one [B, h, T, d] per map, with equal strides and contiguous channels.
        k: one [B, h_kv, S, d] per map, or one that two maps share, with equal strides and contiguous channels.
        v: [B, h_kv, S, dv] with contiguous channels.
        starts, ends: first valid position of each sequence and one past the last, int32 [B], or None if all are valid.
        scale: factor of Q·Kᵀ.
        tile_rows: number of rows of a tile; the number of rows of Q's codes is rounded up to a multiple of it.
        block: number of keys that share a scale.
        values: whether to quantize V too.

    Returns:
        codes of Q, int8 [B, h, n, rows, d]. n is 2 if each map has its own keys (V1), else 1. `rows` is T, or 2·T if a
            query's two maps are adjacent rows (V2), rounded up to whole tiles. Excess rows are undefined.
        scales of Q, float32 [B, h, n, rows], multiplied by the factor of Q·Kᵀ and log2(e).
        codes of K, int8 [B, h_kv, n, keys, d], starting at each sequence's first valid key. `keys` is S rounded up to
            whole blocks; codes beyond the valid keys are 0.
        scales of K, float32 [B, h_kv, n, keys / block].
        codes of V, e4m3 [B, h_kv, dv, keys], with keys as in K but every 16 in the order of `swizzle`; or None.
        scales of V, float32 [B, h_kv, dv], or None.
    """
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    own_keys = len(k)
    packed = len(q) // own_keys
    rows = triton.cdiv(length * packed, tile_rows) * tile_rows
    padded = triton.cdiv(keys, block) * block

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    q8 = new(batch, heads, own_keys, rows, width, dtype=torch.int8)
    q_scale = new(batch, heads, own_keys, rows)
    k8 = new(batch, kv_heads, own_keys, padded, width, dtype=torch.int8)
    k_scale = new(batch, kv_heads, own_keys, padded // block)
    v8 = new(batch, kv_heads, value_width, padded, dtype=torch.float8_e4m3fn) if values else None
    v_scale = new(batch, kv_heads, value_width) if values else None
    chunk = triton.cdiv(triton.cdiv(keys, _CHUNKS), _ROWS) * _ROWS
    chunks = triton.cdiv(keys, chunk)
    k_sum = new(batch, kv_heads, own_keys, chunks, width)
    v_max = new(batch, kv_heads, chunks, value_width) if values else None

    _statistics[(chunks * batch * kv_heads,)](
        k[0], k[-1], v, k_sum, v_max, starts, ends,
        k[0].stride()[:3], v.stride()[:3], kv_heads, keys, chunk,
        N=own_keys, D=width, DV=value_width, ROWS=_ROWS,
        num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    query_blocks, key_blocks = triton.cdiv(length, _ROWS), padded // block
    value_rows = min(_ROWS, block)
    value_blocks = padded // value_rows if values else 0
    counts = (query_blocks * batch * heads * len(q), key_blocks * batch * kv_heads * own_keys)
    _quantize[(sum(counts) + value_blocks * batch * kv_heads,)](
        q[0], q[-1], k[0], k[-1], v, q8, q_scale, k8, k_scale, v8, v_scale, k_sum, v_max, starts, ends,
        q[0].stride()[:3], k[0].stride()[:3], v.stride()[:3],
        heads, kv_heads, length, keys, rows, padded, chunks, scale * math.log2(math.e), *counts,
        N=own_keys, PACK=packed, D=width, DV=value_width, ROWS=_ROWS, BLOCK=block, VALUE_ROWS=value_rows,
        num_warps=8, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return q8, q_scale, k8, k_scale, v8, v_scale


@triton.jit
def swizzle(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Reorder every 16 keys of x [ROWS, KEYS] from (half, thread, pair) to (thread, half, pair) with 4 threads.

    A thread holds keys 2i, 2i + 1, 2i + 8 and 2i + 9 of a tensor core's result, but must hold four consecutive ones of
    an 8-bit operand. In this order they are consecutive, so softmax weights need not move between threads.
    """
    split = x.reshape([ROWS, KEYS // 16, 2, 4, 2])
    return split.permute(0, 1, 3, 2, 4).reshape([ROWS, KEYS])


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["S", "chunk"])
def _statistics(
    k0, k1, v, k_sum, v_max, starts, ends,
    k_strides, v_strides, kv_heads, S, chunk,
    N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the sum of each K channel and the largest magnitude of each V channel over a chunk of keys."""
    chunks = tl.cdiv(S, chunk)
    part, head = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sequence, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    lo, hi = part * chunk, tl.minimum((part + 1) * chunk, valid)
    channel, value = tl.arange(0, D), tl.arange(0, DV)
    for own in tl.static_range(N):
        k = (k0 if own == 0 else k1) + sequence * k_strides[0] + kv_head * k_strides[1]
        k += tl.cast(start, tl.int64) * k_strides[2]
        total = tl.zeros([D], tl.float32)
        for n in range(lo, hi, ROWS):
            key = n + tl.arange(0, ROWS)
            x = k + key.to(tl.int64)[:, None] * k_strides[2] + channel[None, :]
            total += tl.sum(tl.load(x, mask=key[:, None] < hi, other=0.0).to(tl.float32), 0)
        tl.store(k_sum + ((head * N + own) * chunks + part) * D + channel, total)
    if v_max is not None:
        v += sequence * v_strides[0] + kv_head * v_strides[1] + tl.cast(start, tl.int64) * v_strides[2]
        largest = tl.zeros([DV], tl.float32)
        for n in range(lo, hi, ROWS):
            key = n + tl.arange(0, ROWS)
            x = v + key.to(tl.int64)[:, None] * v_strides[2] + value[None, :]
            x = tl.load(x, mask=key[:, None] < hi, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        tl.store(v_max + (head * chunks + part) * DV + value, largest)


@triton.jit(do_not_specialize=["T", "S", "chunks", "query_programs", "key_programs"])
def _quantize(
    q0, q1, k0, k1, v, q8, q_scale, k8, k_scale, v8, v_scale, k_sum, v_max, starts, ends,
    q_strides, k_strides, v_strides,
    heads, kv_heads, T, S, rows, padded, chunks, logit_scale, query_programs, key_programs,
    N: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VALUE_ROWS: tl.constexpr,
):  # fmt: skip
    """Quantize one block of Q, K or V, depending on the program's index."""
    program = tl.program_id(0)
    if program < query_programs:
        blocks = tl.cdiv(T, ROWS)
        head, block = program // blocks // (N * PACK), program % blocks
        which = program // blocks % (N * PACK)
        sequence = (head // heads).to(tl.int64)
        q = (q0 if which == 0 else q1) + sequence * q_strides[0] + (head % heads).to(tl.int64) * q_strides[1]
        start, valid = valid_range(starts, ends, sequence, S)
        _query_block(
            q, q_strides[2], q8, q_scale, head, which, block, S - T - start, valid, T, rows, logit_scale,
            N, PACK, D, ROWS,
        )  # fmt: skip
    elif program < query_programs + key_programs:
        program -= query_programs
        blocks = padded // BLOCK
        head, block = program // blocks // N, program % blocks
        which = program // blocks % N
        sequence = (head // kv_heads).to(tl.int64)
        start, valid = valid_range(starts, ends, sequence, S)
        k = (k0 if which == 0 else k1) + sequence * k_strides[0] + (head % kv_heads).to(tl.int64) * k_strides[1]
        k += tl.cast(start, tl.int64) * k_strides[2]
        _key_block(k, k_strides[2], k8, k_scale, k_sum, head * N + which, block, valid, padded, chunks, D, BLOCK)
    elif v8 is not None:
        program -= query_programs + key_programs
        blocks = padded // VALUE_ROWS
        head, block = program // blocks, program % blocks
        sequence = (head // kv_heads).to(tl.int64)
        start, valid = valid_range(starts, ends, sequence, S)
        v += (
            sequence * v_strides[0]
            + (head % kv_heads).to(tl.int64) * v_strides[1]
            + tl.cast(start, tl.int64) * v_strides[2]
        )
        _value_block(
            v, v_strides[2], v8, v_scale, v_max, head, block, valid, padded, chunks, DV, VALUE_ROWS,
        )  # fmt: skip


@triton.jit
def _query_block(
    q, q_t, q8, q_scale, head, which, block, offset, valid, T, rows, logit_scale,
    N: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    query, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    position = query + offset
    kept = (query < T) & (position >= 0) & (position < valid)
    x = tl.load(q + query.to(tl.int64)[:, None] * q_t + channel[None, :], mask=kept[:, None], other=0.0)
    x = x.to(tl.float32) * logit_scale
    codes, scale = _to_codes(x, tl.max(tl.abs(x), 1, keep_dims=True))
    # If maps share keys, their rows alternate; otherwise each map has a separate range of rows.
    row = query * PACK + which if PACK == 2 else query
    row = row + (head * N + (0 if PACK == 2 else which)).to(tl.int64) * rows
    tl.store(q8 + row[:, None] * D + channel[None, :], codes, mask=(query < T)[:, None])
    tl.store(q_scale + row, tl.reshape(scale, [ROWS]), mask=query < T)


@triton.jit
def _key_block(k, k_s, k8, k_scale, k_sum, head, block, valid, padded, chunks, D: tl.constexpr, BLOCK: tl.constexpr):
    key, channel = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for part in range(0, chunks):
        total += tl.load(k_sum + (head * chunks + part) * D + channel)
    mean = total / tl.maximum(valid, 1)
    kept = (key < valid)[:, None]
    x = tl.load(k + key.to(tl.int64)[:, None] * k_s + channel[None, :], mask=kept, other=0.0).to(tl.float32)
    x = tl.where(kept, x - mean[None, :], 0.0)
    codes, scale = _to_codes(x, tl.max(tl.max(tl.abs(x), 1), 0))
    row = key + head.to(tl.int64) * padded
    tl.store(k8 + row[:, None] * D + channel[None, :], codes)
    tl.store(k_scale + head * (padded // BLOCK) + block, scale)


@triton.jit
def _value_block(v, v_s, v8, v_scale, v_max, head, block, valid, padded, chunks, DV: tl.constexpr, ROWS: tl.constexpr):
    key, value = block * ROWS + tl.arange(0, ROWS), tl.arange(0, DV)
    largest = tl.zeros([DV], tl.float32)
    for part in range(0, chunks):
        largest = tl.maximum(largest, tl.load(v_max + (head * chunks + part) * DV + value))
    scale = tl.where(largest == 0, 1.0, largest / _E4M3_MAX)
    kept = (key < valid)[:, None]
    x = tl.load(v + key.to(tl.int64)[:, None] * v_s + value[None, :], mask=kept, other=0.0).to(tl.float32)
    codes = swizzle(tl.trans((x / scale[None, :]).to(tl.float8e4nv)), DV, ROWS)
    row = value + head.to(tl.int64) * DV
    tl.store(v8 + row[:, None] * padded + key[None, :], codes)
    if block == 0:
        tl.store(v_scale + row, scale)


@triton.jit
def _to_codes(x, largest):
    scale = tl.where(largest == 0, 1.0, largest / 127)
    return ((x / scale + _ROUND) - _ROUND).to(tl.int8), scale
