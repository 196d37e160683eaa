"""Attention over a range of keys with an online softmax, shared by the prefill kernels.

A tile is a block of rows, one per query. Positions count from the sequence's first valid key; there are `keys` valid
keys, and a row at position p sees keys 0 to p.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def count_visible_keys(query, queries, offset, valid):
    """Return how many keys each query sees.

    `query` are indices below `queries`, `offset` is the position of query 0 among the keys, and `valid` is the number
    of valid keys.
    """
    position = query + offset
    # A query outside the valid range is itself padding.
    sees = (query < queries) & (position >= 0) & (position < valid)
    return tl.where(sees, position + 1, 0)


@triton.jit
def masked_key_bounds(visible, valid, BN: tl.constexpr):
    """Split the keys of a tile, whose rows see the first `visible` keys each, into unmasked and masked ones.

    Rows that see no key are ignored, since their results are discarded.

    Returns:
        outer: all rows see the keys before this multiple of BN, without a mask.
        stop: only some rows see the keys [outer, stop), which need a mask. No row sees keys from `stop` on.
    """
    stop = tl.max(visible)
    return tl.minimum(tl.min(tl.where(visible > 0, visible, valid)), stop) // BN * BN, stop


# Finite lower bound of row maxima: -inf minus -inf would be NaN for rows that have seen no key yet.
LOWEST = tl.constexpr(-1.0e30)
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def tensor_offset(strides, sequence, head, position):
    """Return the int64 offset, in elements, of a position of a head of a sequence in a tensor with these strides."""
    return (
        tl.cast(sequence, tl.int64) * strides[0]
        + tl.cast(head, tl.int64) * strides[1]
        + tl.cast(position, tl.int64) * strides[2]
    )


@triton.jit
def valid_range(Starts, Ends, sequence, length):
    """Return a sequence's first valid position and its number of valid positions, both limited by `length`.

    Starts and Ends hold the first valid position of each sequence and one past the last, or are None.
    """
    start = 0
    end = length
    if Starts is not None:
        start = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
    if Ends is not None:
        end = tl.minimum(tl.maximum(tl.load(Ends + sequence), start), length)
    return start, end - start


@triton.jit
def causal_key_bounds(first, last, keys, STEP: tl.constexpr):
    """Return the key ranges of a tile whose rows are at positions `first` to `last`.

    Returns:
        inner_end, end: each row sees all keys before inner_end, a multiple of STEP, and no row sees keys from `end` on.
    """
    end = tl.where(first < keys, tl.maximum(tl.minimum(last + 1, keys), 0), 0)
    return tl.minimum(tl.maximum(first + 1, 0), end) // STEP * STEP, end


@triton.jit
def load_rows(
    source, first, column, bound, stride,
    STEP: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Load a tile [STEP, WIDTH] that begins at row `first` and a column; rows from `bound` on are 0.

    `source` is a TMA descriptor if USE_TMA, else a pointer. A pointer's rows are compared with `bound` only if EDGE.
    """
    if USE_TMA:
        rows = source.load([first, column])
    else:
        row = tl.arange(0, STEP)
        places = source + column + tl.cast(first, tl.int64) * stride
        places += row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        rows = tl.load(places, mask=(first + row < bound)[:, None], other=0.0) if EDGE else tl.load(places)
    return rows


@triton.jit
def attend_keys(
    left, right, largest, total, q, K, V, k_stride, v_stride, begin, end, position, keys, scale,
    EDGE: tl.constexpr, USE_TMA: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over keys `begin` to exclusive `end`.

    Args:
        left, right: weighted sums of values [rows, PART] over the first and second PART channels. `right` is unused
            if PARTS is 1.
        largest, total: maxima of logits and sums of weights [rows].
        q: queries [rows, WIDTH]; their positions are `position` [rows].
        K, V: keys and values, as `source` of `load_rows`.
        keys: number of valid keys.
        scale: factor of Q·Kᵀ, times log2(e).
        EDGE: whether some rows do not see all of these keys, so that logits are masked.

    Returns:
        left, right, largest and total, updated.
    """
    for first in tl.range(begin, end, STEP):
        k = load_rows(K, first, 0, keys, k_stride, STEP, WIDTH, USE_TMA, EDGE)
        logits = tl.dot(q, k.T)
        if EDGE:
            column = first + tl.arange(0, STEP)
            seen = (column < keys)[None, :]
            seen &= column[None, :] <= position[:, None]
            logits = tl.where(seen, logits, -float("inf"))
        raised = tl.maximum(largest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - raised[:, None])
        shrink = tl.exp2(largest - raised)
        total = total * shrink + tl.sum(weights, 1)
        largest = raised
        weights = weights.to(q.dtype)
        v = load_rows(V, first, 0, keys, v_stride, STEP, PART, USE_TMA, EDGE)
        left = tl.dot(weights, v, left * shrink[:, None])
        if PARTS == 2:
            v = load_rows(V, first, PART, keys, v_stride, STEP, PART, USE_TMA, EDGE)
            right = tl.dot(weights, v, right * shrink[:, None])
    return left, right, largest, total


@triton.jit
def attend_tile(
    q, K, V, k_stride, v_stride, first, last, position, keys, scale,
    USE_TMA: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q·Kᵀ·scale)·V of one tile, float32 [rows, PART · PARTS]; rows without visible keys get 0.

    The rows' positions are `position` [rows], from `first` to `last`; `keys` is the number of valid keys.

    Value channels are processed in one or two PARTS of PART channels. Two are for Ampere: if values are wider than the
    number of rows, Triton distributes warps over columns, and warps exchange row maxima and weights through shared
    memory. On Hopper one part is faster, since the products of two parts wait for each other.
    """
    rows: tl.constexpr = q.shape[0]
    left = tl.zeros([rows, PART], tl.float32)
    right = tl.zeros([rows, PART], tl.float32)
    largest = tl.full([rows], LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    inner_end, end = causal_key_bounds(first, last, keys, STEP)
    # Most keys are in this range; masking them would take a third more instructions.
    left, right, largest, total = attend_keys(
        left, right, largest, total, q, K, V, k_stride, v_stride, 0, inner_end, position,
        keys, scale, False, USE_TMA, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip
    left, right, largest, total = attend_keys(
        left, right, largest, total, q, K, V, k_stride, v_stride, inner_end, end, position,
        keys, scale, True, USE_TMA, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip
    # A query beyond the valid range is padding.
    blind = (total == 0) | (position >= keys)
    out = tl.join(left, right).permute(0, 2, 1).reshape(rows, PART * PARTS) if PARTS == 2 else left
    # Selected instead of multiplied by 0, since padding may be NaN.
    return tl.where(blind[:, None], 0.0, out * (1.0 / tl.where(blind, 1.0, total))[:, None])


@triton.jit
def to_float16(x):
    """Convert to float16, clamping to its finite range; NaN stays NaN."""
    return tl.clamp(x, -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def pair_norm(out, Weight, eps, factor, VALUE_WIDTH: tl.constexpr):
    """Apply RMSNorm to each row, with a weight unless Weight is None, and multiply by `factor`."""
    out *= (tl.rsqrt(tl.sum(out * out, 1) / VALUE_WIDTH + eps) * factor)[:, None]
    if Weight is not None:
        out *= tl.load(Weight + tl.arange(0, VALUE_WIDTH)).to(tl.float32)[None, :]
    return out


def supports_tma(*tensors: Tensor) -> bool:
    """Return whether TMA descriptors can read these tensors: contiguous last axis, all else aligned to 16 bytes."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(
            stride * x.element_size() % 16 == 0
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
            if size > 1
        )
        for x in tensors
    )


def allow_descriptors() -> None:
    """Make Triton allocate descriptors for launches of this thread from torch's allocator, on the current stream."""
    # Triton stores the allocator per thread (in a context variable), so setting it once at import is not enough.
    triton.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    # torch aligns to 512 bytes, more than descriptors need.
    return torch.empty(size, dtype=torch.int8, device="cuda")
