"""The first kernel of `decode_paged`: partial sums of attention over one share of a sequence's pages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.decode_span import attend_span, keep_share, nothing_seen
from diffquant.kernels.cache.decode_tiles import query_tiles
from diffquant.kernels.cache.kv_layout import channels_in_word, stored_head
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
        Q1, Q2, q1_stride, q2_stride, k1, k2, v, Table, table_stride, Lengths, Largest, Total, Acc,
        scale, window, capacity, group, noise_group, queries, v_heads, one,
        16, 16, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "capacity", "one"])
def packed_pages_share(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, VCodes, VTop, VScales, Table, table_stride, Lengths,
    Largest, Total, Acc, scale, window, capacity, group, noise_group, queries, k_heads, v_heads, one,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The same over packed pages: those of a `StoredSide` whose sequences are pages, with a scale a token."""
    head = (tl.program_id(0) % v_heads).to(tl.int64)
    # K of the first map stands before K of the second.
    k1 = _packed_head(KCodes, KTop, KScales, head, k_heads, K_BITS, WIDTH)
    k2 = _packed_head(KCodes, KTop, KScales, head + k_heads - v_heads, k_heads, K_BITS, WIDTH)
    v = _packed_head(VCodes, VTop, VScales, head, v_heads, V_BITS, VALUE_WIDTH)
    _attend(
        Q1, Q2, q1_stride, q2_stride, k1, k2, v, Table, table_stride, Lengths, Largest, Total, Acc,
        scale, window, capacity, group, noise_group, queries, v_heads, one,
        K_BITS, V_BITS, WIDTH, VALUE_WIDTH, SHARED_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip


@triton.jit
def _packed_head(Codes, Top, Scales, head, heads, BITS: tl.constexpr, WIDTH: tl.constexpr):
    codes, top, scales = stored_head(Codes, Top, Scales, head, PAGE, BITS, 1, WIDTH)
    return codes, top, scales, heads


@triton.jit
def _attend(
    Q1, Q2, q1_stride, q2_stride, k1, k2, v, Table, table_stride, Lengths, Largest, Total, Acc,
    scale, window, capacity, group, noise_group, queries, v_heads, one,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
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
    sums = attend_span(
        nothing_seen(WARPS, TOKENS, ROWS, VALUE_WIDTH, V_FIELDS), q1, q2, row >= group * queries, first, position,
        tl.maximum(begin, oldest), tl.minimum(begin + share, length), k1, k2, v, Table + sequence * table_stride,
        scale, one, K_BITS, 1, K_FIELDS, 0, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    keep_share(sums, Largest, Total, Acc, V_FIELDS, V_BITS == 16, VALUE_WIDTH, ROWS)
