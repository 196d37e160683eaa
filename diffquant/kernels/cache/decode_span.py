"""One span of keys of `decode_share`: what is loaded of a step, its logits and the weighted values.

Each warp has its own tokens and its own sums. Products are transposed, K·Qᵀ and Vᵀ·Pᵀ, since their left side comes
from registers in the order in which it was loaded: the loop has neither shared memory nor barriers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.decode_tiles import (
    channel_scales,
    matrix_of_queries,
    of_warps,
    spread_over_rows,
    token_scales,
)
from diffquant.kernels.cache.kv_layout import channels_in_word, field_channels, field_of, load_words
from diffquant.kernels.cache.paged_rows import (
    PAGE,
    key_matrix,
    load_keys,
    load_values,
    page_at,
    paged_token_scales,
    pages_of,
    value_channels,
    value_matrix,
)
from diffquant.kernels.linear.unpacking import INTERPRETED


@triton.jit
def nothing_seen(
    WARPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr
):
    """Maxima, sums and fields of weighted values before the first key."""
    return (
        tl.full([WARPS, ROWS], LOWEST, tl.float32),
        tl.zeros([WARPS, TOKENS, ROWS], tl.float32),
        _zeros(WARPS, WIDTH // FIELDS, ROWS, FIELDS),
    )


@triton.jit
def attend_span(
    sums, q1, q2, noise, first, last, begin, end, k1, k2, v, Table, scale, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_FIELDS: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_FIELDS: tl.constexpr, V_RING: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TWO_K: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums after keys begin to end more, of which a row sees those from `first` to `last`.

    With a Table of a sequence's pages, keys and values are in these: states in rows (`paged_rows`), codes in fragments.
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
    begin = begin // STEP * STEP
    next_pages = (0,)
    if PAGED:
        next_pages = pages_of(Table, begin, oldest, end, STEP // PAGE)
    for step in range(begin, end, STEP):
        pages = next_pages
        # Everything is asked for at once, before the first of it is used, and the table's entries a step ahead.
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
            next_pages = pages_of(Table, step + STEP, oldest, end, STEP // PAGE)
        logits = tl.zeros([WARPS, TOKENS, ROWS], tl.float32)
        for field in tl.static_range(K_FIELDS):
            k = _matrix(keys1, field, K_DTYPE, K_BITS, False, K_FIELDS, PAGED, WIDTH, TOKENS, WARPS)
            q = matrix_of_queries(q1[field], key_scales1, field, PER_CHANNEL, K_DTYPE, ROWS, WARPS)
            logits = tl.dot(k, q, logits, input_precision="ieee")
            if TWO_K:
                k = _matrix(keys2, field, K_DTYPE, K_BITS, False, K_FIELDS, PAGED, WIDTH, TOKENS, WARPS)
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
            # Behind the newest token scales may be 0, and in pages anything.
            token = of_warps(step, TOKENS, WARPS)
            of_values = tl.where((token >= oldest) & (token < end), value_scales.to(tl.float32), 1.0)
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
        acc = _weighed(acc, shrink, weights, values, V_DTYPE, V_BITS, V_FIELDS, PAGED, VALUE_WIDTH, TOKENS, WARPS)
    return largest, total, acc


@triton.jit
def _keys(
    k, pages, step, one,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, PAGED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step's keys, and their scales."""
    if PAGED and BITS == 16:
        words = (load_keys(k, pages, WIDTH, TOKENS, WARPS),)
    else:
        words = _words(k, pages, step, one, BITS, FIELDS, RING, PAGED, WIDTH, TOKENS, WARPS)
    if BITS == 16:
        scales = words
    elif PAGED:
        scales = (paged_token_scales(k[2], pages, k[3], TOKENS, WARPS),)
    elif BLOCK == 1:
        scales = (token_scales(k[2] + step, TOKENS, WARPS),)
    else:
        scales = channel_scales(k[2], step, one, BLOCK, FIELDS, WIDTH, ROWS, TOKENS, WARPS)
    return words, scales


@triton.jit
def _values(
    v, pages, step, oldest, end, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step's values, and their scales."""
    if PAGED and BITS == 16:
        words = (load_values(v, pages, step, oldest, end, WIDTH, TOKENS, WARPS),)
    else:
        words = _words(v, pages, step, one, BITS, FIELDS, RING, PAGED, WIDTH, TOKENS, WARPS)
    scales = words
    if BITS < 16:
        if PAGED:
            scales = paged_token_scales(v[2], pages, v[3], TOKENS, WARPS)
        else:
            scales = token_scales(v[2] + step, TOKENS, WARPS)
    return words, scales


@triton.jit
def _words(
    stored, pages, step, one,
    BITS: tl.constexpr, FIELDS: tl.constexpr, RING: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of a step, as `load_words` gives them."""
    index = tl.arange(0, TOKENS * WARPS // 16 * (WIDTH // (16 * FIELDS)))
    fragment = index % WARPS * (TOKENS // 16) + index // (WARPS * (WIDTH // (16 * FIELDS)))
    if PAGED:
        # A page has a fragment of each head.
        fragment = page_at(pages, fragment) * stored[3]
        codes, top = stored[0], stored[1]
    elif RING:
        fragment = (step // 16 + fragment) % (RING // 16)
        codes, top = stored[0], stored[1]
    else:
        words = step * (WIDTH // channels_in_word(BITS))
        codes, top = stored[0] + words, stored[1] + words // 2
    return load_words(codes, top, fragment, one, BITS, WIDTH, FIELDS, TOKENS, WARPS)


@triton.jit
def _weighed(
    acc, shrink, weights, values,
    DTYPE: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fields of acc·shrink + Vᵀ·weights."""
    a = _product(acc, shrink, weights, values, 0, DTYPE, BITS, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
    if FIELDS == 1:
        out = (a,)
    else:
        b = _product(acc, shrink, weights, values, 1, DTYPE, BITS, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
        if FIELDS == 2:
            out = a, b
        else:
            c = _product(acc, shrink, weights, values, 2, DTYPE, BITS, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
            d = _product(acc, shrink, weights, values, 3, DTYPE, BITS, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
            out = a, b, c, d
    return out


@triton.jit
def _product(
    acc, shrink, weights, values,
    FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, PAGED: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    v = _matrix(values, FIELD, DTYPE, BITS, True, FIELDS, PAGED, WIDTH, TOKENS, WARPS)
    return tl.dot(v, weights, acc[FIELD] * shrink, input_precision="ieee")


@triton.jit
def _matrix(
    words, FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    FIELDS: tl.constexpr, PAGED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One field of what was loaded as the left sides of products, in the form of `field_of`."""
    if not PAGED or BITS < 16:
        out = field_of(words, FIELD, DTYPE, BITS, TRANSPOSED, WIDTH // (16 * FIELDS), TOKENS, WARPS)
    elif TRANSPOSED:
        out = value_matrix(words[0], WIDTH, TOKENS, WARPS)
    else:
        out = key_matrix(words[0], WIDTH, TOKENS, WARPS)
    return out


@triton.jit
def _log2(x, CODES: tl.constexpr):
    if tl.float16 == CODES and not INTERPRETED:
        # tl.log2 is a polynomial of a dozen instructions.
        out = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = tl.log2(x)
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
def keep_share(
    sums, Largest, Total, Acc,
    FIELDS: tl.constexpr, IN_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store a program's maxima, sums and weighted values, after its warps' have met; values came IN_ROWS of pages."""
    largest, total, acc = sums
    of_all = tl.max(largest, 0)
    shrink = tl.exp2(largest - of_all[None, :])
    total = tl.sum(tl.sum(total, 1) * shrink, 0)
    tile_index = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    out = (tile_index * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, of_all)
    tl.store(Total + out, total)
    for field in tl.static_range(FIELDS):
        channel = value_channels(WIDTH) if IN_ROWS else field_channels(field, WIDTH, FIELDS)
        weighed = tl.sum(acc[field] * shrink[:, None, :], 0)
        tl.store(Acc + out[None, :] * WIDTH + channel[:, None], weighed)
