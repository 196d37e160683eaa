"""The first kernel of `decode_paged`: partial sums of attention over one share of a sequence's pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.decode_span import attend_span
from diffquant.kernels.cache.decode_sums import keep_share, nothing_seen
from diffquant.kernels.cache.decode_tiles import query_tiles
from diffquant.kernels.cache.kv_layout import channels_in_word, packed_tokens, stored_head, waiting
from diffquant.kernels.cache.paged_rows import PAGE


@triton.jit(do_not_specialize=["window", "capacity", "one"])
def paged_share(
    Q1, Q2, q1_stride, q2_stride, K1, K2, V, k_stride, v_stride, Table, table_stride, Lengths,
    Largest, Total, Acc, scale, window, capacity, group, noise_group, queries, v_heads, one,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted values of a program's rows over its keys, as `decode_share` has them.

    Strides of K and V are those of pages, tokens and heads; those of both maps' keys are alike. `capacity` is the
    number of tokens whose pages a row of the Table can name.
    """
    k1 = (K1 + tl.program_id(0) % v_heads * k_stride[2], k_stride[0], k_stride[1])
    k2 = (K2 + tl.program_id(0) % v_heads * k_stride[2], k_stride[0], k_stride[1])
    v = (V + tl.program_id(0) % v_heads * v_stride[2], v_stride[0], v_stride[1])
    _attend(
        Q1, Q2, q1_stride, q2_stride, k1, k2, v, k1, k2, v, Table, table_stride, Lengths, Largest, Total, Acc,
        scale, window, capacity, group, noise_group, queries, v_heads, one,
        16, 1, 0, 16, 0, 0, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "capacity", "one"])
def packed_pages_share(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Table, table_stride, Lengths, Places, Largest, Total, Acc,
    scale, window, capacity, group, noise_group, queries, k_heads, v_heads, one,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The same over packed pages: those of a `PagedStore`, whose newest tokens may wait in a ring."""
    head = (tl.program_id(0) % v_heads).to(tl.int64)
    # K of the first map stands before K of the second.
    noise = head + k_heads - v_heads
    k1 = _packed_head(KCodes, KTop, KScales, head, k_heads, K_BITS, K_BLOCK, WIDTH)
    k2 = _packed_head(KCodes, KTop, KScales, noise, k_heads, K_BITS, K_BLOCK, WIDTH)
    v = _packed_head(VCodes, VTop, VScales, head, v_heads, V_BITS, 1, VALUE_WIDTH)
    recent1, recent2, recent_v = k1, k2, v
    if K_RING or V_RING:
        place = tl.load(Places + tl.program_id(0) // v_heads).to(tl.int64)
        recent1 = waiting(KRecent + (place * k_heads + head) * (K_RING * WIDTH))
        recent2 = waiting(KRecent + (place * k_heads + noise) * (K_RING * WIDTH))
        recent_v = waiting(VRecent + (place * v_heads + head) * (V_RING * VALUE_WIDTH))
    _attend(
        Q1, Q2, q1_stride, q2_stride, k1, k2, v, recent1, recent2, recent_v, Table, table_stride, Lengths,
        Largest, Total, Acc, scale, window, capacity, group, noise_group, queries, v_heads, one,
        K_BITS, K_BLOCK, K_RING, V_BITS, V_RING, RESIDUAL, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip


@triton.jit
def _packed_head(Codes, Top, Scales, head, heads, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    codes, top, scales = stored_head(Codes, Top, Scales, head, PAGE, BITS, BLOCK, WIDTH)
    return codes, top, scales, heads


@triton.jit
def _attend(
    Q1, Q2, q1_stride, q2_stride, k1, k2, v, recent1, recent2, recent_v, Table, table_stride, Lengths,
    Largest, Total, Acc, scale, window, capacity, group, noise_group, queries, v_heads, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    K_FIELDS: tl.constexpr = channels_in_word(K_BITS)
    V_FIELDS: tl.constexpr = channels_in_word(V_BITS)
    STEP: tl.constexpr = WARPS * TOKENS
    TWO_K: tl.constexpr = Q2 is not None and not SHARED_K
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    head = tl.program_id(0) % v_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    q1, q2 = query_tiles(
        Q1, Q2, q1_stride, q2_stride, sequence, head, group, noise_group, queries, one,
        SHARED_K, K_FIELDS, K_BITS == 16, WIDTH, ROWS, WARPS,
    )  # fmt: skip
    # A longer sequence would have no pages.
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
    begin = tl.maximum(begin, oldest)
    table = Table + sequence * table_stride
    noise = row >= group * queries
    # Values wait no longer than keys, whose blocks leave the ring whole.
    k_packed = packed_tokens(length, 0, K_BITS, K_BLOCK, RESIDUAL)
    v_packed = packed_tokens(length, 0, V_BITS, 1, RESIDUAL)
    sums = attend_span(
        nothing_seen(WARPS, TOKENS, ROWS, VALUE_WIDTH, V_FIELDS), q1, q2, noise, first, position,
        begin, tl.minimum(end, k_packed), k1, k2, v, table, scale, one,
        K_BITS, K_BLOCK, K_FIELDS, 0, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    if K_RING:
        sums = attend_span(
            sums, q1, q2, noise, first, position,
            tl.maximum(begin, k_packed), tl.minimum(end, v_packed), recent1, recent2, v, table, scale, one,
            16, 1, K_FIELDS, K_RING, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    if V_RING:
        sums = attend_span(
            sums, q1, q2, noise, first, position,
            tl.maximum(begin, v_packed), end, recent1, recent2, recent_v, table, scale, one,
            16, 1, K_FIELDS, K_RING, 16, V_FIELDS, V_RING, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    keep_share(sums, Largest, Total, Acc, V_FIELDS, V_BITS == 16, VALUE_WIDTH, ROWS)
