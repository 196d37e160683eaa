"""The loop of `decode_key_split` over a range of keys: loads, logits and weighted values of each step.

Each warp processes different tokens with separate accumulators. Products are transposed, K·Qᵀ and Vᵀ·Pᵀ, so that K and
V are left operands, which tensor cores read from registers in the order in which they were loaded. The loop uses
neither shared memory nor barriers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.decode_tiles import (
    load_channel_scales,
    load_token_scales,
    spread_over_rows,
    to_query_operand,
    token_indices,
)
from diffquant.kernels.cache.kv_layout import (
    PAGE,
    channels_in_word,
    key_matrix,
    load_keys,
    load_page_numbers,
    load_values,
    load_words,
    unpack_words,
    value_matrix,
)
from diffquant.kernels.linear.unpacking import INTERPRETED


@triton.jit
def attend_span(
    sums, q1, q2, noise, first, last, begin, end, k1, k2, v, Table, scale, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_FIELDS: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_FIELDS: tl.constexpr, V_RING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TWO_K: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over keys `begin` to exclusive `end`; a row sees those from `first` to `last`.

    Args:
        sums: accumulators as in `initial_sums`.
        q1, q2: queries from `load_query_tiles`.
        noise: whether each row belongs to the noise map, [ROWS].
        k1, k2, v: pointers to the keys of each map and to values: from `head_pointers` or `ring_pointers`, or with a
            Table, as in `load_keys`.
        Table: pointer to page numbers if keys and values are 16-bit rows in pages, else None.
        TWO_K: whether the maps have separate keys.

    Returns:
        The updated accumulators.
    """
    STATES: tl.constexpr = q1[0].dtype
    CODES: tl.constexpr = tl.float32 if tl.float32 == STATES else tl.float16
    K_DTYPE: tl.constexpr = STATES if K_BITS == 16 else CODES
    V_DTYPE: tl.constexpr = STATES if V_BITS == 16 else CODES
    PER_CHANNEL: tl.constexpr = K_BITS < 16 and K_BLOCK > 1
    PER_TOKEN: tl.constexpr = K_BITS < 16 and K_BLOCK == 1
    STEP: tl.constexpr = WARPS * TOKENS
    PAGED: tl.constexpr = Table is not None
    largest, total, acc = sums
    first = tl.maximum(first, begin)
    last = tl.minimum(last, end - 1)
    oldest = begin
    # An empty range must not load anything, since pages near its begin may belong to another sequence.
    # Both are multiples of STEP, which the compiler uses.
    begin = tl.where(begin < end, begin // STEP, tl.cdiv(end, STEP)) * STEP
    next_pages = (0,)
    if PAGED:
        next_pages = load_page_numbers(Table, begin, oldest, end, STEP // PAGE)
    for step in range(begin, end, STEP):
        pages = next_pages
        # All loads of a step are issued before the first result is used, and table entries are loaded a step ahead.
        keys1, key_scales1 = _keys(
            k1, pages, step, one, K_BITS, K_BLOCK, K_FIELDS, K_RING, PAGED, WIDTH, ROWS, TOKENS, WARPS
        )
        keys2, key_scales2 = keys1, key_scales1
        if TWO_K:
            keys2, key_scales2 = _keys(
                k2, pages, step, one, K_BITS, K_BLOCK, K_FIELDS, K_RING, PAGED, WIDTH, ROWS, TOKENS, WARPS
            )
        values, value_scales = _values(
            v, pages, step, oldest, end, one, V_BITS, V_FIELDS, V_RING, PAGED, VALUE_WIDTH, TOKENS, WARPS
        )
        if PAGED:
            next_pages = load_page_numbers(Table, step + STEP, oldest, end, STEP // PAGE)
        logits = tl.zeros([WARPS, TOKENS, ROWS], tl.float32)
        for field in tl.static_range(K_FIELDS):
            k = _matrix(keys1, field, K_DTYPE, K_BITS, False, K_FIELDS, PAGED, WIDTH, TOKENS, WARPS)
            q = to_query_operand(q1[field], key_scales1, field, PER_CHANNEL, K_DTYPE, ROWS, WARPS)
            logits = tl.dot(k, q, logits, input_precision="ieee")
            if TWO_K:
                k = _matrix(keys2, field, K_DTYPE, K_BITS, False, K_FIELDS, PAGED, WIDTH, TOKENS, WARPS)
                q = to_query_operand(q2[field], key_scales2, field, PER_CHANNEL, K_DTYPE, ROWS, WARPS)
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
            # Scales beyond the newest token may be 0.
            of_values = tl.where(token_indices(step, TOKENS, WARPS) < end, value_scales.to(tl.float32), 1.0)
            of_values = log2_of_scales(of_values, CODES)
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
        acc = _accumulate(acc, shrink, weights, values, V_DTYPE, V_BITS, V_FIELDS, PAGED, VALUE_WIDTH, TOKENS, WARPS)
    return largest, total, acc


@triton.jit
def _keys(
    k, pages, step, one,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, PAGED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load the codes of a step's keys, or 16-bit keys, and the scales."""
    if PAGED:
        words = (load_keys(k, pages, WIDTH, TOKENS, WARPS),)
    else:
        words = _words(k, step, one, BITS, FIELDS, RING, WIDTH, TOKENS, WARPS)
    if BITS == 16:
        scales = words
    elif BLOCK == 1:
        scales = (load_token_scales(k[2] + step, TOKENS, WARPS),)
    else:
        scales = load_channel_scales(k[2], step, one, BLOCK, FIELDS, WIDTH, ROWS, TOKENS, WARPS)
    return words, scales


@triton.jit
def _values(
    v, pages, step, oldest, end, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load the codes of a step's values, or 16-bit values, and the scales."""
    if PAGED:
        words = (load_values(v, pages, step, oldest, end, WIDTH, TOKENS, WARPS),)
    else:
        words = _words(v, step, one, BITS, FIELDS, RING, WIDTH, TOKENS, WARPS)
    scales = words
    if BITS < 16:
        scales = load_token_scales(v[2] + step, TOKENS, WARPS)
    return words, scales


@triton.jit
def _words(
    stored, step, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load the words of a step in the layout of `load_words`, from a store or a ring."""
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
def _accumulate(
    acc, shrink, weights, values,
    DTYPE: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute acc·shrink + Vᵀ·weights, one tensor per field."""
    out = ()
    for field in tl.static_range(FIELDS):
        v = _matrix(values, field, DTYPE, BITS, True, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
        out += (tl.dot(v, weights, acc[field] * shrink, input_precision="ieee"),)
    return out


@triton.jit
def _matrix(
    words, FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    FIELDS: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Unpack one field of loaded words to left operands of products, in the layout of `unpack_words`."""
    if not PAGED:
        out = unpack_words(words, FIELD, DTYPE, BITS, TRANSPOSED, WIDTH // (16 * FIELDS), TOKENS, WARPS)
    elif TRANSPOSED:
        out = value_matrix(words[0], WIDTH, TOKENS, WARPS)
    else:
        out = key_matrix(words[0], WIDTH, TOKENS, WARPS)
    return out


@triton.jit
def log2_of_scales(x, CODES: tl.constexpr):
    """Compute log2 of positive float32 numbers; a fast approximation if CODES, the dtype of products, is float16."""
    if tl.float16 == CODES and not INTERPRETED:
        # The approximation is one instruction, while tl.log2 takes a dozen.
        out = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = tl.log2(x)
    return out
