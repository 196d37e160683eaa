"""Loads queries and scales of `decode_key_split` in the register layout of tensor cores, without shared memory.

A right operand [WARPS, channels, rows] is loaded as [(chunk, half, warp, row), 8]: thread 4g + t holds channels 2t and
2t + 1 of row g. Per-token numbers are loaded as [(16 tokens, half, warp), 32] by the threads whose logits need them;
four threads load the same number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.kv_layout import key_channels
from diffquant.kernels.linear.unpacking import multiply


@triton.jit
def load_query_tiles(
    Q1, Q2, q1_stride, q2_stride, sequence, head, group, noise_group, queries, one,
    SHARED_K: tl.constexpr, FIELDS: tl.constexpr, IN_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load the queries of a program's rows, to be multiplied with the keys of the first and of the second map.

    Rows are ordered by map, then pair or noise head of the KV head, then query. A map's keys meet rows of 0 in place of
    the other map's queries, unless the maps share keys (SHARED_K).

    If keys are stored in 16-bit rows of pages (IN_ROWS), channels are in the order of `key_channels`. Otherwise they
    are in the order of the stored words, each of which holds FIELDS channels (see `field_channels`).

    Returns:
        For each map's keys, a tuple of FIELDS tiles, one for each channel of a word.
    """
    signals = group * queries
    q1 = _tiles(
        Q1 + sequence * q1_stride[0] + head * group * q1_stride[1], q1_stride, 0, signals, queries, one,
        FIELDS, IN_ROWS, WIDTH, ROWS, WARPS,
    )  # fmt: skip
    q2 = q1
    if Q2 is not None:
        q2 = _tiles(
            Q2 + sequence * q2_stride[0] + head * noise_group * q2_stride[1], q2_stride,
            signals, noise_group * queries, queries, one, FIELDS, IN_ROWS, WIDTH, ROWS, WARPS,
        )  # fmt: skip
        if SHARED_K:
            q1 = _add(q1, q2, FIELDS)
    return q1, q2


@triton.jit
def _tiles(
    Q, stride, first, count, queries, one,
    FIELDS: tl.constexpr, IN_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load one map's queries, one tile per field; rows outside the `count` rows from `first` on are 0."""
    index = tl.arange(0, WIDTH // FIELDS // 8 * WARPS * ROWS)
    row = tl.program_id(2) * ROWS + index % ROWS
    at = (row - first) // queries * stride[1] + row % queries * stride[2]
    here = (row >= first) & (row < first + count)
    if IN_ROWS:
        channel = key_channels((index // (ROWS * WARPS))[:, None], tl.arange(0, 8)[None, :])
    else:
        channel = _channels(one, FIELDS, WIDTH, ROWS, WARPS)
    return _fields(Q + at[:, None] + channel, here[:, None], FIELDS)


@triton.jit
def load_channel_scales(
    Scales, step, one, BLOCK: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load K's per-channel scales of the block of tokens that each warp reads.

    Return FIELDS tiles, one per channel of a stored word, laid out like those of `load_query_tiles`.
    """
    warp = tl.arange(0, WIDTH // FIELDS // 8 * WARPS * ROWS) // ROWS % WARPS
    block = (step + warp * TOKENS) // BLOCK
    return _fields(Scales + block[:, None] * WIDTH + _channels(one, FIELDS, WIDTH, ROWS, WARPS), None, FIELDS)


@triton.jit
def to_query_operand(
    q, scales, FIELD: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr
):
    """Convert one tile of queries to a right operand [WARPS, channels, ROWS], of dtype DTYPE.

    If SCALED, the queries are first multiplied by tile FIELD of the channel scales.
    """
    if SCALED:
        # A float16 product is rounded once, which gives the same result as rounding a float32 product.
        HALF: tl.constexpr = q.dtype == tl.float16
        q = multiply(q, scales[FIELD]) if HALF else q.to(tl.float32) * scales[FIELD].to(tl.float32)
    CHUNKS: tl.constexpr = q.shape[0] // (2 * WARPS * ROWS)
    q = q.to(DTYPE).reshape(CHUNKS, 2, WARPS, ROWS, 8)
    return q.permute(2, 0, 1, 4, 3).reshape(WARPS, CHUNKS * 16, ROWS)


@triton.jit
def token_indices(step, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Return the token indices of a step in the layout of per-token numbers, [(16 tokens, half, warp), 32]."""
    index = tl.arange(0, TOKENS // 8 * WARPS)[:, None]
    lane = tl.arange(0, 32)[None, :]
    return step + index % WARPS * TOKENS + index // WARPS * 8 + lane // 4


@triton.jit
def load_token_scales(Scales, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Load a step's per-token scales in the layout of `token_indices`; Scales points to that of the first token."""
    return tl.load(Scales + token_indices(0, TOKENS, WARPS))


@triton.jit
def spread_over_rows(x, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Broadcast per-token numbers from the layout of `token_indices` to all rows, [WARPS, TOKENS, ROWS]."""
    x = x.reshape(TOKENS // 8, WARPS, 8, 4).permute(1, 0, 2, 3).reshape(WARPS, TOKENS, 4, 1)
    return x.broadcast_to(WARPS, TOKENS, 4, ROWS // 4).reshape(WARPS, TOKENS, ROWS)


@triton.jit
def _channels(one, FIELDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the channel indices of the first field in the layout of the queries."""
    index = tl.arange(0, WIDTH // FIELDS // 8 * WARPS * ROWS)[:, None]
    column = tl.arange(0, 8)[None, :]
    half = index // (ROWS * WARPS)
    # If the compiler knew that `one` is 1, threads would load more contiguous elements than the layout needs.
    return half // 2 * (16 * FIELDS) + half % 2 * 8 + column // 2 * 2 * one + column % 2


@triton.jit
def _fields(at, mask, FIELDS: tl.constexpr):
    other = None if mask is None else 0.0
    out = ()
    for field in tl.static_range(FIELDS):
        out += (tl.load(at + field * 16, mask=mask, other=other),)
    return out


@triton.jit
def _add(a, b, FIELDS: tl.constexpr):
    out = ()
    for field in tl.static_range(FIELDS):
        out += (a[field] + b[field],)
    return out
