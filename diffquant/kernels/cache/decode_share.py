"""The first kernel of `decode`: partial sums of attention over one share of a `KVStore`'s keys.

A tile holds the rows of one KV head: both maps of every query pair that reads it. So V is read once, and
where the maps have keys of their own each row is zero for the other's. Products are transposed, K·Qᵀ and Vᵀ·Pᵀ, since
their left side comes from registers in the store's order. Each warp has its own tokens and its own sums, which
meet when the share is done: the loop has neither shared memory nor barriers.

K's scales multiply q (per channel) or the logits (per token). V's scales enter the running maximum as log2(scale):
weights are the products probability times scale and fill float16's range however small V is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.decode_tiles import (
    channel_scales,
    matrix_of_queries,
    of_warps,
    query_tiles,
    spread_over_rows,
    token_scales,
)
from diffquant.kernels.cache.kv_layout import (
    channels_in_word,
    field_channels,
    field_of,
    load_words,
    packed_tokens,
    stored_head,
)
from diffquant.kernels.linear.unpacking import INTERPRETED


@triton.jit(do_not_specialize=["one"])
def decode_share(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Progress, Starts, Ends, Largest, Total, Acc, scale, capacity, group, noise_group, queries, k_heads, v_heads, one,
    RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted values of a program's rows over its keys.

    Programs are (sequence and KV head, share, tile of rows), in this order because only a grid's first axis may be
    longer than 65,535. Rows are ordered map, query pair (or noise head) of the group, query. A warp takes TOKENS of
    each step. `scale` includes log2(e); `one` is 1, which the compiler must not know.
    """
    STEP: tl.constexpr = WARPS * TOKENS
    K_FIELDS: tl.constexpr = channels_in_word(K_BITS)
    V_FIELDS: tl.constexpr = channels_in_word(V_BITS)
    TWO_K: tl.constexpr = Q2 is not None and not SHARED_K
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    head = tl.program_id(0) % v_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    signals = group * queries
    q1 = query_tiles(
        Q1 + sequence * q1_stride[0] + head * group * q1_stride[1], q1_stride, 0, signals, queries, one,
        K_FIELDS, WIDTH, ROWS, WARPS,
    )  # fmt: skip
    q2 = q1
    if Q2 is not None:
        q2 = query_tiles(
            Q2 + sequence * q2_stride[0] + head * noise_group * q2_stride[1], q2_stride,
            signals, noise_group * queries, queries, one, K_FIELDS, WIDTH, ROWS, WARPS,
        )  # fmt: skip
        if SHARED_K:
            q1 = _added(q1, q2, K_FIELDS)

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
    sums = (
        tl.full([WARPS, ROWS], LOWEST, tl.float32),
        tl.zeros([WARPS, TOKENS, ROWS], tl.float32),
        _zeros(WARPS, VALUE_WIDTH // V_FIELDS, ROWS, V_FIELDS),
    )
    noise = row >= signals
    sums = _span(
        sums, q1, q2, noise, first, position, begin, tl.minimum(end, tl.minimum(k_packed, v_packed)),
        k1, k2, v, scale, one,
        K_BITS, K_BLOCK, K_FIELDS, 0, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
    )  # fmt: skip
    if K_RING:
        k1 = _waiting(KRecent + k_head * (K_RING * WIDTH))
        k2 = _waiting(KRecent + (k_head + v_heads) * (K_RING * WIDTH))
        # Blocks leave K's window whole: V may be packed, or have no window, where K waits.
        sums = _span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, k_packed), tl.minimum(end, v_packed),
            k1, k2, v, scale, one,
            16, 1, K_FIELDS, K_RING, V_BITS, V_FIELDS, 0, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip
    if V_RING:
        v = _waiting(VRecent + v_head * (V_RING * VALUE_WIDTH))
        sums = _span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, v_packed), end,
            k1, k2, v, scale, one,
            16, 1, K_FIELDS, K_RING, 16, V_FIELDS, V_RING, WIDTH, VALUE_WIDTH, TWO_K, ROWS, TOKENS, WARPS,
        )  # fmt: skip

    largest, total, acc = sums
    of_all = tl.max(largest, 0)
    shrink = tl.exp2(largest - of_all[None, :])
    total = tl.sum(tl.sum(total, 1) * shrink, 0)
    tile_index = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    out = (tile_index * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, of_all)
    tl.store(Total + out, total)
    for field in tl.static_range(V_FIELDS):
        channel = field_channels(field, VALUE_WIDTH, V_FIELDS)
        weighed = tl.sum(acc[field] * shrink[:, None, :], 0)
        tl.store(Acc + out[None, :] * VALUE_WIDTH + channel[:, None], weighed)


@triton.jit
def _span(
    sums, q1, q2, noise, first, last, begin, end, k1, k2, v, scale, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_FIELDS: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_FIELDS: tl.constexpr, V_RING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TWO_K: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums after keys begin to end more, of which a row sees those from `first` to `last`."""
    STATES: tl.constexpr = q1[0].dtype
    CODES: tl.constexpr = tl.float32 if tl.float32 == STATES else tl.float16
    K_DTYPE: tl.constexpr = STATES if K_BITS == 16 else CODES
    V_DTYPE: tl.constexpr = STATES if V_BITS == 16 else CODES
    PER_CHANNEL: tl.constexpr = K_BITS < 16 and K_BLOCK > 1
    PER_TOKEN: tl.constexpr = K_BITS < 16 and K_BLOCK == 1
    STEP: tl.constexpr = WARPS * TOKENS
    K_CHUNKS: tl.constexpr = WIDTH // (16 * K_FIELDS)
    V_CHUNKS: tl.constexpr = VALUE_WIDTH // (16 * V_FIELDS)
    largest, total, acc = sums
    first = tl.maximum(first, begin)
    last = tl.minimum(last, end - 1)
    begin = begin // STEP * STEP
    for step in range(begin, end, STEP):
        # Everything is asked for at once, before the first of it is used.
        keys1, key_scales1 = _keys(k1, step, one, K_BITS, K_BLOCK, K_FIELDS, K_RING, WIDTH, ROWS, TOKENS, WARPS)
        keys2, key_scales2 = keys1, key_scales1
        if TWO_K:
            keys2, key_scales2 = _keys(k2, step, one, K_BITS, K_BLOCK, K_FIELDS, K_RING, WIDTH, ROWS, TOKENS, WARPS)
        values, value_scales = _values(v, step, one, V_BITS, V_FIELDS, V_RING, VALUE_WIDTH, TOKENS, WARPS)
        logits = tl.zeros([WARPS, TOKENS, ROWS], tl.float32)
        for field in tl.static_range(K_FIELDS):
            k = field_of(keys1, field, K_DTYPE, K_BITS, False, K_CHUNKS, TOKENS, WARPS)
            q = matrix_of_queries(q1[field], key_scales1, field, PER_CHANNEL, K_DTYPE, ROWS, WARPS)
            logits = tl.dot(k, q, logits, input_precision="ieee")
            if TWO_K:
                k = field_of(keys2, field, K_DTYPE, K_BITS, False, K_CHUNKS, TOKENS, WARPS)
                q = matrix_of_queries(q2[field], key_scales2, field, PER_CHANNEL, K_DTYPE, ROWS, WARPS)
                logits = tl.dot(k, q, logits, input_precision="ieee")
        if PER_TOKEN:
            of_keys = spread_over_rows(key_scales1[0].to(tl.float32), ROWS, TOKENS, WARPS)
            if TWO_K:
                of_noise = spread_over_rows(key_scales2[0].to(tl.float32), ROWS, TOKENS, WARPS)
                of_keys = tl.where(noise[None, None, :], of_noise, of_keys)
            logits *= of_keys
        token = step + tl.arange(0, WARPS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        seen = (token[:, :, None] >= first[None, None, :]) & (token[:, :, None] <= last[None, None, :])
        logits = tl.where(seen, logits * scale, -float("inf"))
        if V_BITS < 16:
            # Behind the newest token scales may be 0.
            of_values = tl.where(of_warps(step, TOKENS, WARPS) < end, value_scales.to(tl.float32), 1.0)
            of_values = _log2(of_values, CODES)
            logits += spread_over_rows(of_values, ROWS, TOKENS, WARPS)
        raised = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - raised)[:, None, :]
        largest = raised
        weights = tl.exp2(logits - raised[:, None, :])
        probabilities = weights
        if V_BITS < 16:
            probabilities *= spread_over_rows(tl.exp2(-of_values), ROWS, TOKENS, WARPS)
        total = total * shrink + probabilities
        weights = weights.to(V_DTYPE)
        acc = _weighed(acc, shrink, weights, values, V_DTYPE, V_BITS, V_FIELDS, V_CHUNKS, TOKENS, WARPS)
    return largest, total, acc


@triton.jit
def _keys(
    k, step, one,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step's keys, and their scales."""
    words = _words(k, step, one, BITS, FIELDS, RING, WIDTH, TOKENS, WARPS)
    if BITS == 16:
        scales = words
    elif BLOCK == 1:
        scales = (token_scales(k[2] + step, TOKENS, WARPS),)
    else:
        scales = channel_scales(k[2], step, one, BLOCK, FIELDS, WIDTH, ROWS, TOKENS, WARPS)
    return words, scales


@triton.jit
def _values(
    v, step, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step's values, and their scales."""
    words = _words(v, step, one, BITS, FIELDS, RING, WIDTH, TOKENS, WARPS)
    scales = words
    if BITS < 16:
        scales = token_scales(v[2] + step, TOKENS, WARPS)
    return words, scales


@triton.jit
def _words(
    stored, step, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step, as `load_words` gives them."""
    index = tl.arange(0, TOKENS * WARPS // 16 * (WIDTH // (16 * FIELDS)))
    fragment = index % WARPS * (TOKENS // 16) + index // (WARPS * (WIDTH // (16 * FIELDS)))
    if RING:
        fragment = (step // 16 + fragment) % (RING // 16)
        codes, top = stored[0], stored[1]
    else:
        words = step * (WIDTH // channels_in_word(BITS))
        codes, top = stored[0] + words, stored[1] + words // 2
    return load_words(codes, top, fragment, one, BITS, WIDTH, FIELDS, TOKENS, WARPS)


@triton.jit
def _weighed(
    acc, shrink, weights, values,
    DTYPE: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fields of acc·shrink + Vᵀ·weights."""
    a = _product(acc, shrink, weights, values, 0, DTYPE, BITS, CHUNKS, TOKENS, WARPS)
    if FIELDS == 1:
        out = (a,)
    else:
        b = _product(acc, shrink, weights, values, 1, DTYPE, BITS, CHUNKS, TOKENS, WARPS)
        if FIELDS == 2:
            out = a, b
        else:
            c = _product(acc, shrink, weights, values, 2, DTYPE, BITS, CHUNKS, TOKENS, WARPS)
            d = _product(acc, shrink, weights, values, 3, DTYPE, BITS, CHUNKS, TOKENS, WARPS)
            out = a, b, c, d
    return out


@triton.jit
def _product(
    acc, shrink, weights, values,
    FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    v = field_of(values, FIELD, DTYPE, BITS, True, CHUNKS, TOKENS, WARPS)
    return tl.dot(v, weights, acc[FIELD] * shrink, input_precision="ieee")


@triton.jit
def _log2(x, CODES: tl.constexpr):
    if tl.float16 == CODES and not INTERPRETED:
        # tl.log2 is a polynomial of a dozen instructions.
        out = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = tl.log2(x)
    return out


@triton.jit
def _added(a, b, FIELDS: tl.constexpr):
    if FIELDS == 1:
        out = (a[0] + b[0],)
    elif FIELDS == 2:
        out = a[0] + b[0], a[1] + b[1]
    else:
        out = a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
    return out


@triton.jit
def _zeros(WARPS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr):
    zeros = tl.zeros([WARPS, CHANNELS, ROWS], tl.float32)
    if FIELDS == 1:
        out = (zeros,)
    elif FIELDS == 2:
        out = zeros, zeros
    else:
        out = zeros, zeros, zeros, zeros
    return out


@triton.jit
def _waiting(recent):
    """Pointers as `stored_head` gives them, to states not yet quantized."""
    return recent, recent, recent
