"""The layout of a `KVStore`: positions of tokens and channels in 16-bit words, and unpacking of words to matrices.

A fragment is 16 tokens by 16 channels in the register order of a tensor core's left operand, as in
`diffquant.kernels.linear.repack`: the 8 elements of a thread are contiguous. Rows of a key fragment are tokens; rows of
a value fragment are channels, since P·V sums over tokens. A word contains FIELDS codes, called fields, of one token:
one from each of FIELDS adjacent fragments. So tokens never share a word.

Pages of 16 tokens with contiguous channels are vLLM's blocks, read in place. Results depend neither on the order of
channels in a sum nor on the order of output rows. So a thread loads 8 contiguous channels of a token, 16 bytes, instead
of the pairs of a fragment: for keys, its columns of two fragments; for values, its rows of four. Queries are loaded in
the same order of channels, and results are stored by channel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"

import triton
import triton.language as tl

from diffquant.kernels.cache import stored_side
from diffquant.kernels.linear import repack
from diffquant.kernels.linear.unpacking import load_high, unpack_field

channels_in_word = triton.constexpr_function(stored_side.channels_in_word)


@triton.jit
def word_index(token, channel, WIDTH: tl.constexpr, FIELDS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return the index, within a head, of the word that holds a token's channel.

    Rows of fragments are tokens, or channels if TRANSPOSED. A word holds FIELDS channels of a head of WIDTH channels.
    """
    chunk = token // 16 * (WIDTH // (16 * FIELDS)) + channel // (16 * FIELDS)
    row, column = token % 16, channel % 16
    if TRANSPOSED:
        row, column = channel % 16, token % 16
    return chunk * 256 + row % 8 * 32 + column // 2 % 4 * 8 + column // 8 * 4 + row // 8 * 2 + column % 2


@triton.jit
def field_channels(FIELD: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr):
    """Return the indices of the channels [WIDTH / FIELDS] that are stored in field FIELD of a head's words."""
    index = tl.arange(0, WIDTH // FIELDS)
    return index // 16 * (16 * FIELDS) + FIELD * 16 + index % 16


@triton.jit
def load_words(
    Codes, Top, fragment, one,
    BITS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load the words of TOKENS tokens per warp, for `unpack_words`.

    A row of a tile has 256 words, those of 16 tokens and a chunk of 16 · FIELDS channels. Rows are ordered by 16
    tokens, then chunk, then warp. `fragment` is the index of each row's first token divided by 16.

    Returns:
        A tuple of tiles. At 4 or 8 BITS it has the words of codes, at 6 BITS these and their high bits. At 16 BITS it
        has one tile for each of FIELDS groups of 16 channels.
    """
    CHUNKS: tl.constexpr = WIDTH // (16 * FIELDS)
    chunk = tl.arange(0, TOKENS // 16 * CHUNKS * WARPS) // WARPS % CHUNKS
    word = tl.arange(0, 256)[None, :]
    if BITS == 16:
        at = Codes + (fragment * (CHUNKS * FIELDS) + chunk * FIELDS)[:, None] * 256 + word
        out = ()
        for field in tl.static_range(FIELDS):
            out += (tl.load(at + field * 256),)
    else:
        at = (fragment * CHUNKS + chunk)[:, None]
        low = tl.load(Codes + at * 256 + word)
        COUNT: tl.constexpr = TOKENS // 16 * CHUNKS * WARPS
        out = (low, load_high(Top + at * 128, None, one, COUNT)) if BITS == 6 else (low,)
    return out


@triton.jit
def unpack_words(
    words, FIELD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Unpack one field of words to a left operand of a product, without applying scales.

    Keys become [WARPS, TOKENS, CHUNKS * 16], values (TRANSPOSED) [WARPS, CHUNKS * 16, TOKENS].
    """
    last: tl.constexpr = len(words) - 1
    x = words[FIELD].to(DTYPE) if BITS == 16 else unpack_field(words[0], words[last], DTYPE, FIELD, BITS)
    # (16 tokens, chunk, warp), then within a fragment (g, t, column half, row half, column of a pair).
    x = x.reshape(TOKENS // 16, CHUNKS, WARPS, 8, 4, 2, 2, 2)
    if TRANSPOSED:
        out = x.permute(2, 1, 6, 3, 0, 5, 4, 7).reshape(WARPS, CHUNKS * 16, TOKENS)
    else:
        out = x.permute(2, 0, 6, 3, 1, 5, 4, 7).reshape(WARPS, TOKENS, CHUNKS * 16)
    return out


@triton.jit
def count_packed_tokens(length, floor, BITS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """Return how many of `length` tokens are packed: whole BLOCKs before the newest RESIDUAL, at least `floor`.

    With 16 BITS, all tokens count as packed.
    """
    return length if BITS == 16 else tl.maximum(floor, (length - RESIDUAL) // BLOCK * BLOCK)


@triton.jit
def head_pointers(Codes, Top, Scales, head, capacity, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to a head's codes, high bits and scales; each head has memory for `capacity` tokens."""
    scales = capacity * WIDTH // BLOCK if BLOCK > 1 else capacity
    words: tl.constexpr = WIDTH // channels_in_word(BITS)
    return Codes + head * capacity * words, Top + head * capacity * (words // 2), Scales + head * scales


@triton.jit
def ring_pointers(recent):
    """Return a pointer to a ring of unquantized keys or values three times.

    The result can be used like that of `head_pointers`, although a ring has neither high bits nor scales.
    """
    return recent, recent, recent


PAGE = tl.constexpr(repack.FRAGMENT)


@triton.jit
def load_page_numbers(Table, begin, oldest, end, COUNT: tl.constexpr):
    """Return a tuple of COUNT page numbers: those of the 16 · COUNT tokens from `begin` on.

    Queries see tokens from `oldest` to exclusive `end`. Table entries of other pages may be undefined, so they are not
    read; the nearest defined entry is returned in their place.
    """
    first = oldest // PAGE
    out = ()
    for i in tl.static_range(COUNT):
        number = tl.minimum(tl.maximum(begin // PAGE + i, first), tl.maximum(end - 1, 0) // PAGE)
        out += (tl.load(Table + number),)
    return out


@triton.jit
def select_page(pages, number):
    """Return pages[number] as int64 for a tuple of pages and a tensor of indices, without accessing memory."""
    out = tl.zeros_like(number) + pages[0]
    for i in tl.static_range(1, len(pages)):
        out = tl.where(number == i, pages[i], out)
    return out.to(tl.int64)


@triton.jit
def load_keys(k, pages, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Load a step's unquantized keys from pages, as a tile for `key_matrix`.

    A row of the tile has 256 elements, those of 8 tokens and 32 channels. Rows are indexed, slowest first, by page of
    16 tokens, 32 channels, half page (8 tokens), and warp. `k` is a tuple of a pointer to a head's first channel and
    the strides of pages and tokens.
    """
    HALVES: tl.constexpr = WIDTH // 32 * 2
    index = tl.arange(0, TOKENS // PAGE * HALVES * WARPS)
    page = select_page(pages, index % WARPS * (TOKENS // PAGE) + index // (HALVES * WARPS))
    lane = tl.arange(0, 256)[None, :]
    token = (index // WARPS % 2 * 8)[:, None] + lane // 32
    channel = (index // (2 * WARPS) % (WIDTH // 32) * 32)[:, None] + lane // 8 % 4 * 8 + lane % 8
    return tl.load(k[0] + page[:, None] * k[1] + token * k[2] + channel)


@triton.jit
def key_matrix(x, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Return keys [WARPS, TOKENS, WIDTH] with channels in the order of `key_channels`."""
    # (16 tokens, 32 channels, row half, warp, g, t, fragment, column half, column of a pair)
    x = x.reshape(TOKENS // PAGE, WIDTH // 32, 2, WARPS, 8, 4, 2, 2, 2)
    return x.permute(3, 0, 2, 4, 1, 6, 7, 5, 8).reshape(WARPS, TOKENS, WIDTH)


@triton.jit
def key_channels(run, column):
    """Return the channel at index 8 · `run` + `column` of queries whose channels are in the order of `key_matrix`."""
    return run // 4 * 32 + column // 2 * 8 + run % 4 * 2 + column % 2


@triton.jit
def load_values(v, pages, begin, oldest, end, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Load a step's unquantized values from pages, beginning at token `begin`, as a tile for `value_matrix`.

    A row of the tile has 256 elements, those of 4 tokens and 64 channels. Rows are ordered by 16 tokens, then 64
    channels, then quarter of the 16 tokens, then warp. `v` is a tuple like `k` of `load_keys`.

    Tokens outside [oldest, end) are replaced by the nearest token inside. Their weight is 0, but memory there is
    undefined and may contain NaN.
    """
    QUARTERS: tl.constexpr = WIDTH // 64 * 4
    index = tl.arange(0, TOKENS // PAGE * QUARTERS * WARPS)
    number = index % WARPS * (TOKENS // PAGE) + index // (QUARTERS * WARPS)
    page = select_page(pages, number)
    lane = tl.arange(0, 256)[None, :]
    # A thread's four tokens are two adjacent ones in each half of 16.
    quarter = index // WARPS % 4
    token = (quarter // 2 * 8 + quarter % 2)[:, None] + lane // 8 % 4 * 2
    channel = (index // (4 * WARPS) % (WIDTH // 64) * 64)[:, None] + lane // 32 * 8 + lane % 8
    token = begin + (number * PAGE)[:, None] + token
    token = tl.minimum(tl.maximum(token, oldest), end - 1) & (PAGE - 1)
    return tl.load(v[0] + page[:, None] * v[1] + token * v[2] + channel)


@triton.jit
def value_matrix(x, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Return values [WARPS, WIDTH, TOKENS] with channels in the order of `value_channels`."""
    # (16 tokens, 64 channels, column half, column of a pair, warp, g, t, fragment, row half)
    x = x.reshape(TOKENS // PAGE, WIDTH // 64, 2, 2, WARPS, 8, 4, 4, 2)
    return x.permute(4, 1, 7, 8, 5, 0, 2, 6, 3).reshape(WARPS, WIDTH, TOKENS)


@triton.jit
def value_channels(WIDTH: tl.constexpr):
    """Return the channel indices [WIDTH] of the rows of `value_matrix`."""
    row = tl.arange(0, WIDTH)
    return row // 64 * 64 + row % 8 * 8 + row % 64 // 8
