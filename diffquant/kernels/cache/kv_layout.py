"""The layout of a `KVStore` as kernels read it: which word holds a channel of a token, and words as matrices.

A fragment is 16 tokens by 16 channels, in the order in which tensor cores take the left side of a product, as
`diffquant.kernels.linear.repack` has it: a thread finds its 8 elements side by side. Keys are multiplied as they are,
so their rows are tokens; of values, whose tokens are summed over, rows are channels. A word holds one token's
channels of FIELDS fragments beside each other, and so no two tokens share a word.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache import kv_store
from diffquant.kernels.linear.unpacking import load_high, unpack_field

channels_in_word = triton.constexpr_function(kv_store.channels_in_word)


@triton.jit
def place(token, channel, WIDTH: tl.constexpr, FIELDS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Index of the word, among a head's, that holds a token's channel; `TRANSPOSED` where rows are channels."""
    chunk = token // 16 * (WIDTH // (16 * FIELDS)) + channel // (16 * FIELDS)
    row, column = token % 16, channel % 16
    if TRANSPOSED:
        row, column = channel % 16, token % 16
    return chunk * 256 + row % 8 * 32 + column // 2 % 4 * 8 + column // 8 * 4 + row // 8 * 2 + column % 2


@triton.jit
def column_in_fragment():
    """Column of each of a fragment's 256 elements, in the order of `place`."""
    at = tl.arange(0, 256)
    return at // 8 % 4 * 2 + at // 4 % 2 * 8 + at % 2


@triton.jit
def field_channels(FIELD: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr):
    """Channels [WIDTH / FIELDS] that stand in one field of the words."""
    index = tl.arange(0, WIDTH // FIELDS)
    return index // 16 * (16 * FIELDS) + FIELD * 16 + index % 16


@triton.jit
def load_words(
    Codes, Top, fragment, one,
    BITS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Words of TOKENS tokens a warp, as a tuple of tiles [(16 tokens, chunk, warp), 256] that `field_of` takes apart.

    `fragment` [(16 tokens, chunk, warp)] is the number of 16 tokens that stand before. Where BITS is 16, states are
    loaded as fields too, those that the codes' FIELDS would hold.
    """
    CHUNKS: tl.constexpr = WIDTH // (16 * FIELDS)
    chunk = tl.arange(0, TOKENS // 16 * CHUNKS * WARPS) // WARPS % CHUNKS
    word = tl.arange(0, 256)[None, :]
    if BITS == 16:
        at = Codes + (fragment * (CHUNKS * FIELDS) + chunk * FIELDS)[:, None] * 256 + word
        if FIELDS == 1:
            out = (tl.load(at),)
        elif FIELDS == 2:
            out = tl.load(at), tl.load(at + 256)
        else:
            out = tl.load(at), tl.load(at + 256), tl.load(at + 512), tl.load(at + 768)
    else:
        at = (fragment * CHUNKS + chunk)[:, None]
        low = tl.load(Codes + at * 256 + word)
        COUNT: tl.constexpr = TOKENS // 16 * CHUNKS * WARPS
        out = (low, load_high(Top + at * 128, None, one, COUNT)) if BITS == 6 else (low,)
    return out


@triton.jit
def field_of(
    words, FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One field as the left sides of products, not multiplied by scales.

    Keys give [WARPS, TOKENS, CHUNKS * 16], values [WARPS, CHUNKS * 16, TOKENS].
    """
    last: tl.constexpr = len(words) - 1
    x = words[FIELD].to(DTYPE) if BITS == 16 else unpack_field(words[0], words[last], DTYPE, FIELD, BITS)
    # (16 tokens, chunk, warp), and of a fragment (g, t, column half, row half, column of a pair).
    x = x.reshape(TOKENS // 16, CHUNKS, WARPS, 8, 4, 2, 2, 2)
    if TRANSPOSED:
        out = x.permute(2, 1, 6, 3, 0, 5, 4, 7).reshape(WARPS, CHUNKS * 16, TOKENS)
    else:
        out = x.permute(2, 0, 6, 3, 1, 5, 4, 7).reshape(WARPS, TOKENS, CHUNKS * 16)
    return out


@triton.jit
def packed_tokens(length, floor, BITS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """Number of packed tokens, as `StoredSide.packed` counts them."""
    return length if BITS == 16 else tl.maximum(floor, (length - RESIDUAL) // BLOCK * BLOCK)


@triton.jit
def stored_head(Codes, Top, Scales, head, capacity, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to a head's codes, second plane and scales; heads stand one after another, `capacity` tokens each."""
    scales = capacity * WIDTH // BLOCK if BLOCK > 1 else capacity
    words: tl.constexpr = WIDTH // channels_in_word(BITS)
    return Codes + head * capacity * words, Top + head * capacity * (words // 2), Scales + head * scales


@triton.jit
def waiting(recent):
    """Pointers as `stored_head` gives them, to states not yet quantized."""
    return recent, recent, recent
