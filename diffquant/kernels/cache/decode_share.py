"""Computes attention over one share of the keys: the first kernel of `decode` and of decoding from pages.

The rows of one KV head are the queries of both maps of all pairs that use it, so V is read once. If the maps have
separate keys, there are two Q·Kᵀ, and in each the other map's rows are 0. Each warp processes different tokens with
separate accumulators, which are combined at the end of the share.

K's scales multiply q (per channel) or the logits (per token). V's scales are included in the running maximum as
log2(scale). So softmax weights, already multiplied by V's scales, use float16's range however small V is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"

import triton
import triton.language as tl

from diffquant.kernels.cache.decode_span import attend_span
from diffquant.kernels.cache.decode_split import find_program_keys, initial_sums, store_partial_sums
from diffquant.kernels.cache.decode_tiles import load_query_tiles
from diffquant.kernels.cache.kv_layout import channels_in_word, head_pointers, ring_pointers


@triton.jit(do_not_specialize=["window", "one"])
def decode_key_split(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Progress, Starts, Ends, Largest, Total, Acc,
    scale, window, capacity, group, noise_group, queries, k_heads, v_heads, one,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute partial maxima, sums and weighted values of a program's rows over its share of the keys.

    The grid is (sequence and KV head, share, tile of rows), since only the first axis may be longer than 65,535. Rows
    are ordered as in `load_query_tiles`. Each warp processes TOKENS tokens per step. `scale` includes log2(e). `one` is
    1, passed at run time to prevent the compiler from merging loads.
    """
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    head = tl.program_id(0) % v_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    first, position, begin, end, k_packed, v_packed = find_program_keys(
        Progress, Starts, Ends, sequence, row, queries, window, RESIDUAL, K_BITS, K_BLOCK, V_BITS, ROWS, WARPS * TOKENS
    )
    # Key heads of the first map precede those of the second.
    k_head = sequence * k_heads + head
    k1 = head_pointers(KCodes, KTop, KScales, k_head, capacity, K_BITS, K_BLOCK, WIDTH)
    k2 = head_pointers(KCodes, KTop, KScales, k_head + v_heads, capacity, K_BITS, K_BLOCK, WIDTH)
    v_head = sequence * v_heads + head
    v = head_pointers(VCodes, VTop, VScales, v_head, capacity, V_BITS, 1, VALUE_WIDTH)
    recent1, recent2 = k1, k2
    if K_RING:
        recent1 = ring_pointers(KRecent + k_head * (K_RING * WIDTH))
        recent2 = ring_pointers(KRecent + (k_head + v_heads) * (K_RING * WIDTH))
    recent_v = ring_pointers(VRecent + v_head * (V_RING * VALUE_WIDTH))
    _attend_share(
        Q1, Q2, q1_stride, q2_stride, first, position, begin, end, k_packed, v_packed,
        k1, k2, v, recent1, recent2, recent_v, None, Largest, Total, Acc,
        scale, group, noise_group, queries, v_heads, one,
        K_BITS, K_BLOCK, K_RING, V_BITS, V_RING, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip


@triton.jit
def _attend_share(
    Q1, Q2, q1_stride, q2_stride, first, position, begin, end, k_packed, v_packed,
    k1, k2, v, recent1, recent2, recent_v, Table, Largest, Total, Acc, scale, group, noise_group, queries, v_heads, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Attend to keys `begin` to `end`: packed ones, keys in their ring beside packed values, and both in rings."""
    K_FIELDS: tl.constexpr = channels_in_word(K_BITS)
    V_FIELDS: tl.constexpr = channels_in_word(V_BITS)
    TWO_K: tl.constexpr = Q2 is not None and not SHARED_K
    PAGED: tl.constexpr = Table is not None
    q1, q2 = load_query_tiles(
        Q1, Q2, q1_stride, q2_stride, (tl.program_id(0) // v_heads).to(tl.int64), tl.program_id(0) % v_heads,
        group, noise_group, queries, one, SHARED_K, K_FIELDS, PAGED, WIDTH, ROWS, WARPS,
    )  # fmt: skip
    noise = tl.program_id(2) * ROWS + tl.arange(0, ROWS) >= group * queries
    sums = attend_span(
        initial_sums(WARPS, TOKENS, ROWS, VALUE_WIDTH, V_FIELDS), q1, q2, noise, first, position,
        begin, tl.minimum(end, tl.minimum(k_packed, v_packed)), k1, k2, v, Table, scale, one,
        K_BITS, K_BLOCK, K_FIELDS, 0, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    if K_RING:
        # K may leave its ring in whole blocks, so V may already be packed where K is still in the ring.
        sums = attend_span(
            sums, q1, q2, noise, first, position,
            tl.maximum(begin, k_packed), tl.minimum(end, v_packed), recent1, recent2, v, Table, scale, one,
            16, 1, K_FIELDS, K_RING, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    if V_RING:
        sums = attend_span(
            sums, q1, q2, noise, first, position,
            tl.maximum(begin, v_packed), end, recent1, recent2, recent_v, Table, scale, one,
            16, 1, K_FIELDS, K_RING, 16, V_FIELDS, V_RING, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    store_partial_sums(sums, Largest, Total, Acc, V_FIELDS, PAGED, VALUE_WIDTH, ROWS)


@triton.jit(do_not_specialize=["window", "capacity", "one"])
def paged_key_split(
    Q1, Q2, q1_stride, q2_stride, K1, K2, V, k_stride, v_stride, Table, table_stride, Lengths,
    Largest, Total, Acc, scale, window, capacity, group, noise_group, queries, v_heads, one,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute what `decode_key_split` computes, but read 16-bit keys and values from pages.

    Strides of K and V are of pages, tokens and heads, equal for both maps' keys. `capacity` is the number of tokens
    that a row of the page Table covers.
    """
    STEP: tl.constexpr = WARPS * TOKENS
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    # Clamped, since the table has no pages beyond the capacity.
    length = tl.minimum(tl.load(Lengths + sequence), capacity)
    position = length - queries + row % queries
    first = tl.zeros([ROWS], tl.int32)
    oldest = 0
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        oldest = tl.maximum(length - queries - window + 1, 0)
    begin = oldest // STEP * STEP
    share = tl.cdiv(tl.cdiv(length - begin, STEP), tl.num_programs(1)) * STEP
    begin += tl.program_id(1) * share
    end = tl.minimum(begin + share, length)
    k1 = (K1 + tl.program_id(0) % v_heads * k_stride[2], k_stride[0], k_stride[1])
    k2 = (K2 + tl.program_id(0) % v_heads * k_stride[2], k_stride[0], k_stride[1])
    v = (V + tl.program_id(0) % v_heads * v_stride[2], v_stride[0], v_stride[1])
    _attend_share(
        Q1, Q2, q1_stride, q2_stride, first, position, tl.maximum(begin, oldest), end, end, end,
        k1, k2, v, k1, k2, v, Table + sequence * table_stride, Largest, Total, Acc,
        scale, group, noise_group, queries, v_heads, one,
        16, 1, 0, 16, 0, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
