"""The first kernel of `decode`: partial sums of attention over one share of a `KVStore`'s keys.

A tile holds the rows of one KV head: both maps of every query pair that reads it. So V is read once, and
where the maps have keys of their own each row is zero for the other's. K's scales multiply q (per channel)
or the logits (per token). V's scales enter the running maximum as log2(scale): weights are the products
probability times scale and fill float16's range however small V is.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.kv_layout import packed_tokens, parts, parts_of, stored_head, whole


@triton.jit
def decode_share(
    Q1, Q2, q_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent, Progress, Starts, Ends,
    Largest, Total, Acc, scale, capacity, group, queries, window, k_heads, v_heads,
    RESIDUAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    SHARED_K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted values of a program's rows over its keys.

    Programs are (sequence and KV head, share, tile of rows), in this order because only a grid's first axis may be
    longer than 65,535. Rows are ordered map, query pair of the group, query.
    `scale` includes log2(e).
    """
    V_PARTS: tl.constexpr = parts_of(V_BITS)
    sequence = (tl.program_id(0) // v_heads).to(tl.int64)
    head = tl.program_id(0) % v_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    of_map = group * queries
    query = row % queries
    pair = head * group + row % of_map // queries
    at = sequence * q_stride[0] + pair * q_stride[1] + query * q_stride[2]
    noise = row >= of_map
    column = tl.arange(0, WIDTH)[None, :]
    q1 = tl.load(Q1 + at[:, None] + column, mask=(row < of_map)[:, None], other=0.0)
    q2 = q1
    if Q2 is not None:
        q2 = tl.load(Q2 + at[:, None] + column, mask=(noise & (row < 2 * of_map))[:, None], other=0.0)
        if SHARED_K:
            q1 += q2

    length = tl.load(Progress)
    position = length - queries + query
    first = tl.zeros([ROWS], tl.int32)
    begin = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
        begin = tl.maximum(length - queries - window + 1, 0)
    if Starts is not None:
        start = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
        first = tl.maximum(first, start)
        begin = tl.maximum(begin, start)
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
    TWO_K: tl.constexpr = Q2 is not None and not SHARED_K
    sums = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), _zeros(ROWS, VALUE_WIDTH, V_PARTS)
    sums = _span(
        sums, q1, q2, noise, first, position, begin, tl.minimum(end, tl.minimum(k_packed, v_packed)), k1, k2, v, scale,
        K_BITS, K_BLOCK, 0, V_BITS, 0, V_PARTS, WIDTH, VALUE_WIDTH, TWO_K, STEP, STAGES, PTX,
    )  # fmt: skip
    if K_RING:
        k1 = _waiting(KRecent + k_head * (K_RING * WIDTH))
        k2 = _waiting(KRecent + (k_head + v_heads) * (K_RING * WIDTH))
        # Blocks leave K's window whole: V may be packed, or have no window, where K waits.
        sums = _span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, k_packed), tl.minimum(end, v_packed),
            k1, k2, v, scale,
            16, 1, K_RING, V_BITS, 0, V_PARTS, WIDTH, VALUE_WIDTH, TWO_K, STEP, 1, PTX,
        )  # fmt: skip
    if V_RING:
        v = _waiting(VRecent + v_head * (V_RING * VALUE_WIDTH))
        sums = _span(
            sums, q1, q2, noise, first, position, tl.maximum(begin, v_packed), end, k1, k2, v, scale,
            16, 1, K_RING, 16, V_RING, V_PARTS, WIDTH, VALUE_WIDTH, TWO_K, STEP, 1, PTX,
        )  # fmt: skip

    largest, total, acc = sums
    tile_index = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    out = (tile_index * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, largest)
    tl.store(Total + out, total)
    PART: tl.constexpr = VALUE_WIDTH // V_PARTS
    for part in tl.static_range(V_PARTS):
        column = part * PART + tl.arange(0, PART)
        tl.store(Acc + out[:, None] * VALUE_WIDTH + column[None, :], acc[part])


@triton.jit
def _span(
    sums, q1, q2, noise, first, last, begin, end, k1, k2, v, scale,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_RING: tl.constexpr, V_PARTS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TWO_K: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Sums after keys begin to end more, of which a row sees those from `first` to `last`."""
    STATES: tl.constexpr = q1.dtype
    CODES: tl.constexpr = tl.float32 if tl.float32 == STATES else tl.float16
    K_DTYPE: tl.constexpr = STATES if K_BITS == 16 else CODES
    V_DTYPE: tl.constexpr = STATES if V_BITS == 16 else CODES
    PER_CHANNEL: tl.constexpr = K_BITS < 16 and K_BLOCK > 1
    PER_TOKEN: tl.constexpr = K_BITS < 16 and K_BLOCK == 1
    largest, total, acc = sums
    first = tl.maximum(first, begin)[:, None]
    last = tl.minimum(last, end - 1)[:, None]
    for step in tl.range(begin // STEP * STEP, end, STEP, num_stages=STAGES):
        token = step + tl.arange(0, STEP)
        k_at = token % K_RING if K_RING else token
        scales = k1[2] + step // K_BLOCK * WIDTH
        k = whole(k1[0], k1[1], k_at, K_BITS, WIDTH, K_DTYPE, PTX)
        logits = tl.dot(_scaled(q1, scales, PER_CHANNEL, K_DTYPE), tl.trans(k), input_precision="ieee")
        if TWO_K:
            scales = k2[2] + step // K_BLOCK * WIDTH
            k = whole(k2[0], k2[1], k_at, K_BITS, WIDTH, K_DTYPE, PTX)
            logits = tl.dot(_scaled(q2, scales, PER_CHANNEL, K_DTYPE), tl.trans(k), logits, input_precision="ieee")
        if PER_TOKEN:
            of_tokens = tl.load(k1[2] + token).to(tl.float32)[None, :]
            if TWO_K:
                of_tokens = tl.where(noise[:, None], tl.load(k2[2] + token).to(tl.float32)[None, :], of_tokens)
            logits *= of_tokens
        seen = (token[None, :] >= first) & (token[None, :] <= last)
        logits = tl.where(seen, logits * scale, -float("inf"))
        if V_BITS < 16:
            # Behind the newest token scales may be 0.
            of_values = tl.where(token < end, tl.load(v[2] + token).to(tl.float32), 1.0)
            of_values = _log2(of_values, PTX)
            logits += of_values[None, :]
        raised = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - raised)
        largest = raised
        weights = tl.exp2(logits - raised[:, None])
        probabilities = weights * tl.exp2(-of_values)[None, :] if V_BITS < 16 else weights
        total = total * shrink + tl.sum(probabilities, 1)
        values = parts(v[0], v[1], token % V_RING if V_RING else token, V_BITS, VALUE_WIDTH, V_PARTS, V_DTYPE, PTX)
        acc = _weighed(acc, shrink[:, None], weights.to(V_DTYPE), values, V_PARTS)
    return largest, total, acc


@triton.jit
def _scaled(q, Scales, PER_CHANNEL: tl.constexpr, DTYPE: tl.constexpr):
    """Queries times their channels' scales where they have their own."""
    if PER_CHANNEL:
        q = q.to(tl.float32) * tl.load(Scales + tl.arange(0, q.shape[1])).to(tl.float32)[None, :]
    return q.to(DTYPE)


@triton.jit
def _weighed(acc, shrink, weights, v, PARTS: tl.constexpr):
    """Tiles of acc·shrink + weights·v."""
    if PARTS == 1:
        out = (_product(acc[0], shrink, weights, v[0]),)
    elif PARTS == 2:
        out = _product(acc[0], shrink, weights, v[0]), _product(acc[1], shrink, weights, v[1])
    else:
        out = (
            _product(acc[0], shrink, weights, v[0]),
            _product(acc[1], shrink, weights, v[1]),
            _product(acc[2], shrink, weights, v[2]),
            _product(acc[3], shrink, weights, v[3]),
        )
    return out


@triton.jit
def _product(acc, shrink, weights, v):
    return tl.dot(weights, v, acc * shrink, input_precision="ieee")


@triton.jit
def _log2(x, PTX: tl.constexpr):
    if PTX:
        # tl.log2 is a polynomial of a dozen instructions.
        out = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        out = tl.log2(x)
    return out


@triton.jit
def _zeros(ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    zeros = tl.zeros([ROWS, WIDTH // PARTS], tl.float32)
    if PARTS == 1:
        out = (zeros,)
    elif PARTS == 2:
        out = zeros, zeros
    else:
        out = zeros, zeros, zeros, zeros
    return out


@triton.jit
def _waiting(recent):
    """Pointers as `stored_head` gives them, to states not yet quantized."""
    return recent, recent, recent
