"""The first kernel of `decode`: partial sums of attention over one share of a `KVStore`'s keys.

A tile holds the rows of one KV head: both maps of every query pair that reads it. So V is read once, and
where the maps have keys of their own each row is zero for the other's. Each warp has its own tokens and its own sums,
which meet when the share is done.

K's scales multiply q (per channel) or the logits (per token). V's scales enter the running maximum as log2(scale):
weights are the products probability times scale and fill float16's range however small V is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.decode_span import attend_span
from diffquant.kernels.cache.decode_sums import keep_share, nothing_seen
from diffquant.kernels.cache.decode_tiles import query_tiles
from diffquant.kernels.cache.kv_layout import channels_in_word, packed_tokens, stored_head, waiting


@triton.jit(do_not_specialize=["window", "one"])
def decode_share(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Progress, Starts, Ends, Largest, Total, Acc,
    scale, window, capacity, group, noise_group, queries, k_heads, v_heads, one,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted values of a program's rows over its keys.

    Programs are (sequence and KV head, share, tile of rows), in this order because only a grid's first axis may be
    longer than 65,535. Rows are ordered as `query_tiles` has them. A warp takes TOKENS of each step. `scale` includes
    log2(e); `one` is 1, which the compiler must not know.
    """
    STEP: tl.constexpr = WARPS * TOKENS
    K_FIELDS: tl.constexpr = channels_in_word(K_BITS)
    V_FIELDS: tl.constexpr = channels_in_word(V_BITS)
    TWO_K: tl.constexpr = Q2 is not None and not SHARED_K
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    head = tl.program_id(0) % v_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    q1, q2 = query_tiles(
        Q1, Q2, q1_stride, q2_stride, sequence, head, group, noise_group, queries, one,
        SHARED_K, K_FIELDS, False, WIDTH, ROWS, WARPS,
    )  # fmt: skip

    length = tl.load(Progress)
    position = length - queries + row % queries
    first = tl.zeros([ROWS], tl.int32)
    begin = 0
    if Starts is not None:
        begin = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
        first += begin
    if Ends is not None:
        # A query beyond the valid range is padding itself; no other sees so far.
        first = tl.where(position < tl.load(Ends + sequence), first, length)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        begin = tl.maximum(begin, length - queries - window + 1)
    begin = begin // STEP * STEP
    share = tl.cdiv(tl.cdiv(length - begin, STEP), tl.num_programs(1)) * STEP
    begin += tl.program_id(1) * share
    end = tl.minimum(begin + share, length)
    k_packed = packed_tokens(length, tl.load(Progress + 1), K_BITS, K_BLOCK, RESIDUAL)
    v_packed = packed_tokens(length, tl.load(Progress + 2), V_BITS, 1, RESIDUAL)

    # K of the first map stands before K of the second.
    k_head = sequence * k_heads + head
    k1 = stored_head(KCodes, KTop, KScales, k_head, capacity, K_BITS, K_BLOCK, WIDTH)
    k2 = stored_head(KCodes, KTop, KScales, k_head + v_heads, capacity, K_BITS, K_BLOCK, WIDTH)
    v_head = sequence * v_heads + head
    v = stored_head(VCodes, VTop, VScales, v_head, capacity, V_BITS, 1, VALUE_WIDTH)
    sums = nothing_seen(WARPS, TOKENS, ROWS, VALUE_WIDTH, V_FIELDS)
    noise = row >= group * queries
    sums = attend_span(
        sums, q1, q2, noise, first, position, begin, tl.minimum(end, tl.minimum(k_packed, v_packed)),
        k1, k2, v, None, scale, one,
        K_BITS, K_BLOCK, K_FIELDS, 0, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    if K_RING:
        k1 = waiting(KRecent + k_head * (K_RING * WIDTH))
        k2 = waiting(KRecent + (k_head + v_heads) * (K_RING * WIDTH))
        # Blocks leave K's window whole: V may be packed, or have no window, where K waits.
        sums = attend_span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, k_packed), tl.minimum(end, v_packed),
            k1, k2, v, None, scale, one,
            16, 1, K_FIELDS, K_RING, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    if V_RING:
        v = waiting(VRecent + v_head * (V_RING * VALUE_WIDTH))
        sums = attend_span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, v_packed), end,
            k1, k2, v, None, scale, one,
            16, 1, K_FIELDS, K_RING, 16, V_FIELDS, V_RING, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip

    keep_share(sums, Largest, Total, Acc, V_FIELDS, False, VALUE_WIDTH, ROWS)
