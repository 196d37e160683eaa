"""One span of keys of `latent_share`: a step's latents, loaded once, for the logits and then for the weighted sum.

Codes become half floats in registers and pass through shared memory once, from where both products read them: with
queries they are keys, and with softmax weights, transposed, they are values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.decode_span import log2_of_scales
from diffquant.kernels.cache.kv_layout import channels_in_word, load_words
from diffquant.kernels.linear.unpacking import unpack_field


@triton.jit
def latent_span(
    sums, q, q_turned, first, last, begin, end, k, v, scale, one,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_RING: tl.constexpr,
    TURNED: tl.constexpr, LATENT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted latents after keys begin to end more, of which a row sees those from `first` to `last`.

    Rows are queries of the latents [R, c] and of the turned channels [R, r].
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
        # Everything is asked for at once, before the first of it is used.
        latents = _words(v, step, one, V_BITS, V_RING, LATENT, TOKENS)
        turned = _words(k, step, one, K_BITS, K_RING, TURNED, TOKENS)
        token = step + tl.arange(0, TOKENS)
        if V_BITS < 16:
            # Behind the newest token scales may be 0.
            of_latents = tl.load(v[2] + token, mask=token < end, other=1.0).to(tl.float32)
        turned = _matrix(turned, K_DTYPE, K_BITS, False, TURNED, TOKENS)
        if K_BITS < 16:
            turned = _scaled(turned, k[2], token, STATES, K_BLOCK, TURNED)
        latents = _matrix(latents, V_DTYPE, V_BITS, True, LATENT, TOKENS)
        logits = tl.dot(q, latents, input_precision="ieee")
        if V_BITS < 16:
            logits *= of_latents[None, :]
        logits = tl.dot(q_turned, tl.trans(turned), logits, input_precision="ieee")
        seen = (token[None, :] >= first[:, None]) & (token[None, :] <= last[:, None])
        logits = tl.where(seen, logits * scale, -float("inf"))
        if V_BITS < 16:
            # Weights are probability times scale, which fill float16's range however small the latents are.
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
    """Words of a step's tokens, as `load_words` gives them."""
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
    """States or codes of a step's words: [TOKENS, WIDTH], or where the words are TRANSPOSED [WIDTH, TOKENS]."""
    FIELDS: tl.constexpr = channels_in_word(BITS)
    LOW: tl.constexpr = 1 if FIELDS == 1 else 2
    if FIELDS == 1:
        x = words[0].to(DTYPE)
    elif FIELDS == 2:
        x = _two_fields(words, 0, DTYPE, BITS)
    else:
        x = tl.join(_two_fields(words, 0, DTYPE, BITS), _two_fields(words, 2, DTYPE, BITS))
    # (16 tokens, chunk), of a fragment (g, t, column half, row half, column of a pair), low and high bit of the field.
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
def _scaled(codes, Scales, token, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Codes [TOKENS, WIDTH] times the scales of their tokens, or of the channels of their blocks of tokens."""
    if BLOCK == 1:
        scale = tl.load(Scales + token)[:, None]
    else:
        scale = tl.load(Scales + (token // BLOCK * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :])
    return (codes.to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
