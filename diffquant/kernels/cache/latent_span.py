"""The first kernel of `decode_latent`: attention over one share of a store's latents.

A program has as many rows, of both maps and any heads, as its registers can hold accumulators for; all rows use the
same keys. A step's latents are loaded once, for logits and for weighted sums. Codes are unpacked to float16 in
registers and written to shared memory, from which both products read them: as keys for Q·Kᵀ and, transposed, as values
for P·V. Rows are the products' rows. With tokens in their place, as warpgroup MMA needs, Triton 3.9 would load latents
into registers, wait for each product and spill.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.decode_span import log2_of_scales
from diffquant.kernels.cache.decode_split import find_program_keys
from diffquant.kernels.cache.kv_layout import channels_in_word, head_pointers, load_words, ring_pointers
from diffquant.kernels.linear.unpacking import unpack_field


@triton.jit(do_not_specialize=["window", "one"])
def latent_key_split(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Progress, Starts, Ends, Largest, Total, Acc, scale, window, capacity, pairs, noises, queries, tiles, one,
    RESIDUAL: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute partial maxima, sums and weighted latents of a program's rows over its share of the keys.

    The grid is (sequence and tile of rows, share), so that programs that read the same keys run at the same time. Rows
    are ordered by map, then query head, then query. `scale` includes log2(e). `one` is 1, passed at run time to prevent
    the compiler from merging loads.
    """
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    first, position, begin, end, k_packed, v_packed = find_program_keys(
        Progress, Starts, Ends, sequence, row, queries, window, RESIDUAL, K_BITS, K_BLOCK, V_BITS, ROWS, TOKENS
    )

    q, q_rotated = _queries(Q1, q1_stride, sequence, row, pairs, queries, ROTATED, LATENT)
    if Q2 is not None:
        noise, noise_turned = _queries(Q2, q2_stride, sequence, row - pairs * queries, noises, queries, ROTATED, LATENT)
        q += noise
        q_rotated += noise_turned
    k = head_pointers(KCodes, KTop, KScales, sequence, capacity, K_BITS, K_BLOCK, ROTATED)
    v = head_pointers(VCodes, VTop, VScales, sequence, capacity, V_BITS, 1, LATENT)
    sums = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, LATENT], tl.float32)
    sums = attend_latent_span(
        sums, q, q_rotated, first, position, begin, tl.minimum(end, tl.minimum(k_packed, v_packed)), k, v, scale, one,
        K_BITS, K_BLOCK, 0, V_BITS, 0, ROTATED, LATENT, TOKENS,
    )  # fmt: skip
    if K_RING:
        k = ring_pointers(KRecent + sequence * (K_RING * ROTATED))
        # Keys may leave their ring in whole blocks, so latents may already be packed where keys are still in the ring.
        sums = attend_latent_span(
            sums, q, q_rotated, first, position, tl.maximum(begin, k_packed), tl.minimum(end, v_packed), k, v,
            scale, one, 16, 1, K_RING, V_BITS, 0, ROTATED, LATENT, TOKENS,
        )  # fmt: skip
    if V_RING:
        v = ring_pointers(VRecent + sequence * (V_RING * LATENT))
        sums = attend_latent_span(
            sums, q, q_rotated, first, position, tl.maximum(begin, v_packed), end, k, v, scale, one,
            16, 1, K_RING, 16, V_RING, ROTATED, LATENT, TOKENS,
        )  # fmt: skip

    largest, total, acc = sums
    tile = tl.program_id(0).to(tl.int64)
    out = (tile * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, largest)
    tl.store(Total + out, total)
    tl.store(Acc + out[:, None] * LATENT + tl.arange(0, LATENT)[None, :], acc)


@triton.jit
def _queries(Q, stride, sequence, row, heads, queries, ROTATED: tl.constexpr, LATENT: tl.constexpr):
    """Load one map's queries: the channels for latents and those for rotated key channels; other rows are 0."""
    at = Q + sequence * stride[0] + (row // queries * stride[1] + row % queries * stride[2])[:, None]
    here = ((row >= 0) & (row < heads * queries))[:, None]
    q = tl.load(at + tl.arange(0, LATENT)[None, :], mask=here, other=0.0)
    return q, tl.load(at + LATENT + tl.arange(0, ROTATED)[None, :], mask=here, other=0.0)


@triton.jit
def attend_latent_span(
    sums, q, q_rotated, first, last, begin, end, k, v, scale, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_RING: tl.constexpr,
    ROTATED: tl.constexpr, LATENT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over keys `begin` to exclusive `end`; a row sees those from `first` to `last`.

    `q` are R queries [R, LATENT] for latents, `q_rotated` [R, ROTATED] the same queries for rotated key channels. The
    accumulators `sums` are row maxima, sums of weights, and weighted sums of latents; they are returned updated.
    """
    STATES: tl.constexpr = q.dtype
    CODES: tl.constexpr = tl.float32 if tl.float32 == STATES else tl.float16
    K_DTYPE: tl.constexpr = STATES if K_BITS == 16 else CODES
    V_DTYPE: tl.constexpr = STATES if V_BITS == 16 else CODES
    largest, total, acc = sums
    q = q.to(V_DTYPE)
    first = tl.maximum(first, begin)
    last = tl.minimum(last, end - 1)
    begin = begin // TOKENS * TOKENS
    for step in range(begin, end, TOKENS):
        # All loads of a step are issued before the first result is used.
        latents = _words(v, step, one, V_BITS, V_RING, LATENT, TOKENS)
        turned = _words(k, step, one, K_BITS, K_RING, ROTATED, TOKENS)
        token = step + tl.arange(0, TOKENS)
        if V_BITS < 16:
            # Scales beyond the newest token may be 0.
            of_latents = tl.load(v[2] + token, mask=token < end, other=1.0).to(tl.float32)
        turned = _matrix(turned, K_DTYPE, K_BITS, False, ROTATED, TOKENS)
        if K_BITS < 16:
            turned = _scale_codes(turned, k[2], token, STATES, K_BLOCK, ROTATED)
        latents = _matrix(latents, V_DTYPE, V_BITS, True, LATENT, TOKENS)
        logits = tl.dot(q, latents, input_precision="ieee")
        if V_BITS < 16:
            logits *= of_latents[None, :]
        logits = tl.dot(q_rotated, tl.trans(turned), logits, input_precision="ieee")
        seen = (token[None, :] >= first[:, None]) & (token[None, :] <= last[:, None])
        logits = tl.where(seen, logits * scale, -float("inf"))
        if V_BITS < 16:
            # Softmax weights include the latents' scales, so they use float16's range however small the latents are.
            of_latents = log2_of_scales(of_latents, CODES)
            logits += of_latents[None, :]
        raised = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - raised)
        largest = raised
        weights = tl.exp2(logits - raised[:, None])
        probabilities = weights
        if V_BITS < 16:
            probabilities *= tl.exp2(-of_latents)[None, :]
        total = total * shrink + tl.sum(probabilities, 1)
        acc = tl.dot(weights.to(V_DTYPE), tl.trans(latents), acc * shrink[:, None], input_precision="ieee")
    return largest, total, acc


@triton.jit
def _words(
    stored, step, one, BITS: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Load the words of a step's tokens in the layout of `load_words`."""
    FIELDS: tl.constexpr = channels_in_word(BITS)
    CHUNKS: tl.constexpr = WIDTH // (16 * FIELDS)
    fragment = tl.arange(0, TOKENS // 16 * CHUNKS) // CHUNKS
    if RING:
        fragment = (step // 16 + fragment) % (RING // 16)
        codes, top = stored[0], stored[1]
    else:
        words = step * (WIDTH // FIELDS)
        codes, top = stored[0] + words, stored[1] + words // 2
    return load_words(codes, top, fragment, one, BITS, WIDTH, FIELDS, TOKENS, 1)


@triton.jit
def _matrix(
    words, DTYPE: tl.constexpr, BITS: tl.constexpr, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):
    """Unpack a step's words to [TOKENS, WIDTH], or [WIDTH, TOKENS] if TRANSPOSED, without applying scales."""
    FIELDS: tl.constexpr = channels_in_word(BITS)
    LOW: tl.constexpr = 1 if FIELDS == 1 else 2
    if FIELDS == 1:
        x = words[0].to(DTYPE)
    elif FIELDS == 2:
        x = _two_fields(words, 0, DTYPE, BITS)
    else:
        x = tl.join(_two_fields(words, 0, DTYPE, BITS), _two_fields(words, 2, DTYPE, BITS))
    # (16 tokens, chunk), within a fragment (g, t, column half, row half, column of a pair), then bits of the field.
    x = x.reshape(TOKENS // 16, WIDTH // (16 * FIELDS), 8, 4, 2, 2, 2, LOW, FIELDS // LOW)
    if TRANSPOSED:
        out = x.permute(1, 8, 7, 5, 2, 0, 4, 3, 6).reshape(WIDTH, TOKENS)
    else:
        out = x.permute(0, 5, 2, 1, 8, 7, 4, 3, 6).reshape(TOKENS, WIDTH)
    return out


@triton.jit
def _two_fields(words, FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    last: tl.constexpr = len(words) - 1
    low = unpack_field(words[0], words[last], DTYPE, FIELD, BITS)
    return tl.join(low, unpack_field(words[0], words[last], DTYPE, FIELD + 1, BITS))


@triton.jit
def _scale_codes(codes, Scales, token, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply codes [TOKENS, WIDTH] by per-token scales, or by the per-channel scales of their blocks."""
    if BLOCK == 1:
        scale = tl.load(Scales + token)[:, None]
    else:
        scale = tl.load(Scales + (token // BLOCK * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :])
    return (codes.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
