"""Attention over a range of keys with an online softmax, as the prefill kernels share it.

A tile holds some rows (queries); its keys stand from position 0, the sequence's first valid one, to `keys`.
A row at position p sees keys 0 to p (causal), or the last `window` of them, or all.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

# A finite floor for row maxima: -inf less -inf would be NaN where a row sees nothing yet.
LOWEST = tl.constexpr(-1.0e30)
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def at(strides, sequence, head, position):
    """Offset of a sequence's, a head's and a position's first element, safe beyond 2³¹ elements."""
    return (
        tl.cast(sequence, tl.int64) * strides[0]
        + tl.cast(head, tl.int64) * strides[1]
        + tl.cast(position, tl.int64) * strides[2]
    )


@triton.jit
def valid_range(Starts, Ends, sequence, length):
    """First valid position of a sequence and the number of valid ones, inside the tensor whatever the limits say."""
    start = 0
    end = length
    if Starts is not None:
        start = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
    if Ends is not None:
        end = tl.minimum(tl.maximum(tl.load(Ends + sequence), start), length)
    return start, end - start


@triton.jit
def key_spans(first, last, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr):
    """Spans of keys for a tile whose rows stand at positions first to last.

    Returns:
        begin, inner_begin, inner_end, end: each row sees all of [inner_begin, inner_end), and nothing outside
        [begin, end). All but `end` are multiples of STEP.
    """
    begin = 0
    inner_begin = 0
    if CAUSAL:
        end = tl.where(first < keys, tl.maximum(tl.minimum(last + 1, keys), 0), 0)
        inner_end = tl.minimum(tl.maximum(first + 1, 0), end) // STEP * STEP
    else:
        end = keys
        inner_end = keys // STEP * STEP
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // STEP * STEP
        inner_begin = tl.cdiv(tl.maximum(last - window + 1, 0), STEP) * STEP
        inner_end = tl.maximum(inner_begin, inner_end)
    return begin, inner_begin, inner_end, end


@triton.jit
def load_rows(
    source, first, column, bound, stride,
    STEP: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Tile [STEP, WIDTH] of a tensor (a descriptor or a pointer) from a row and a column on; 0 from row `bound` on."""
    if DESCRIBED:
        rows = source.load([first, column])
    else:
        row = tl.arange(0, STEP)
        places = source + column + tl.cast(first, tl.int64) * stride
        places += row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        rows = tl.load(places, mask=(first + row < bound)[:, None], other=0.0) if EDGE else tl.load(places)
    return rows


@triton.jit
def attend_keys(
    left, right, largest, total, q, K, V, k_stride, v_stride, begin, end, position, keys, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr, DESCRIBED: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """State of an online softmax after keys begin to end more.

    Args:
        left, right: weighted values [rows, PART]; `right` is idle where PARTS is 1.
        largest: maxima of the rows [rows]; `total` [rows] is their sums of weights.
        q: queries [rows, WIDTH]; `position` [rows] is theirs.
        scale: factor of Q·Kᵀ, times log2(e).
    """
    for first in tl.range(begin, end, STEP):
        k = load_rows(K, first, 0, keys, k_stride, STEP, WIDTH, DESCRIBED, EDGE)
        logits = tl.dot(q, k.T)
        if EDGE:
            column = first + tl.arange(0, STEP)
            seen = (column < keys)[None, :]
            if CAUSAL:
                seen &= column[None, :] <= position[:, None]
            if WINDOW:
                seen &= column[None, :] > position[:, None] - window
            logits = tl.where(seen, logits, -float("inf"))
        raised = tl.maximum(largest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - raised[:, None])
        shrink = tl.exp2(largest - raised)
        total = total * shrink + tl.sum(weights, 1)
        largest = raised
        weights = weights.to(q.dtype)
        v = load_rows(V, first, 0, keys, v_stride, STEP, PART, DESCRIBED, EDGE)
        left = tl.dot(weights, v, left * shrink[:, None])
        if PARTS == 2:
            v = load_rows(V, first, PART, keys, v_stride, STEP, PART, DESCRIBED, EDGE)
            right = tl.dot(weights, v, right * shrink[:, None])
    return left, right, largest, total


@triton.jit
def attend_tile(
    q, K, V, k_stride, v_stride, first, last, position, keys, window, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DESCRIBED: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attention softmax(q·Kᵀ·scale)·V of one tile: float32 [rows, PART · PARTS]; rows that see nothing give 0.

    Values may come in two parts. Where they are wider than a tile has rows, Triton spreads the warps of
    Ampere's products over columns, which then exchange row maxima and weights through shared memory; on
    Hopper, products in two parts wait for one another.
    """
    rows: tl.constexpr = q.shape[0]
    left = tl.zeros([rows, PART], tl.float32)
    right = tl.zeros([rows, PART], tl.float32)
    largest = tl.full([rows], LOWEST, tl.float32)
    total = tl.zeros([rows], tl.float32)
    begin, inner_begin, inner_end, end = key_spans(first, last, keys, window, CAUSAL, WINDOW, STEP)
    if WINDOW:
        left, right, largest, total = attend_keys(
            left, right, largest, total, q, K, V, k_stride, v_stride, begin, tl.minimum(inner_begin, end), position,
            keys, window, scale, CAUSAL, WINDOW, True, DESCRIBED, STEP, WIDTH, PART, PARTS,
        )  # fmt: skip
    # Most keys lie here, and masking them would cost a third more instructions.
    left, right, largest, total = attend_keys(
        left, right, largest, total, q, K, V, k_stride, v_stride, inner_begin, inner_end, position,
        keys, window, scale, CAUSAL, WINDOW, False, DESCRIBED, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip
    left, right, largest, total = attend_keys(
        left, right, largest, total, q, K, V, k_stride, v_stride, inner_end, end, position,
        keys, window, scale, CAUSAL, WINDOW, True, DESCRIBED, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip
    blind = total == 0
    if CAUSAL:
        # A query beyond the valid range is padding itself.
        blind |= position >= keys
    out = tl.join(left, right).permute(0, 2, 1).reshape(rows, PART * PARTS) if PARTS == 2 else left
    # What padding holds may be NaN, so a factor of 0 would not do.
    return tl.where(blind[:, None], 0.0, out * (1.0 / tl.where(blind, 1.0, total))[:, None])


@triton.jit
def to_float16(x):
    """Value x in float16, with what lies beyond its range at the range's end; NaN stays NaN."""
    return tl.clamp(x, -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def pair_norm(out, Weight, eps, factor, VALUE_WIDTH: tl.constexpr):
    """RMSNorm over a row's values, times `factor`."""
    out *= (tl.rsqrt(tl.sum(out * out, 1) / VALUE_WIDTH + eps) * factor)[:, None]
    if Weight is not None:
        out *= tl.load(Weight + tl.arange(0, VALUE_WIDTH)).to(tl.float32)[None, :]
    return out
