"""Keys and values that lie in pages, 16 tokens each, a token's channels side by side: vLLM's blocks, read in place.

Products do not mind in which order channels are summed over, nor in which order rows of the result stand. So a thread
takes 8 neighbouring channels of a token, 16 bytes, where a fragment has pairs: of a key, the columns that it needs in
two fragments; of a value, its rows of four. Queries are loaded in the same order of channels, and the sums are stored
by the channel that they are of.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.linear import repack

PAGE = tl.constexpr(repack.FRAGMENT)


@triton.jit
def pages_of(Table, begin, oldest, end, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Numbers of the pages that hold COUNT·16 tokens from `begin` on, a tuple.

    Where a page has nothing of the blocks of the tokens [oldest, end), the nearest one that has is named: the Table
    says nothing of it.
    """
    first = oldest // BLOCK * BLOCK // PAGE
    out = ()
    for i in tl.static_range(COUNT):
        number = tl.minimum(tl.maximum(begin // PAGE + i, first), tl.maximum(end - 1, 0) // PAGE)
        out += (tl.load(Table + number),)
    return out


@triton.jit
def page_at(pages, number):
    """Page of each `number` among `pages`, int64. Numbers are a warp's own: this costs selections, no memory."""
    out = tl.zeros_like(number) + pages[0]
    for i in tl.static_range(1, len(pages)):
        out = tl.where(number == i, pages[i], out)
    return out.to(tl.int64)


@triton.jit
def paged_token_scales(Scales, pages, heads, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Scales of a step's tokens in the form of `token_scales`; `Scales` points to a head's of the first page."""
    index = tl.arange(0, TOKENS // 8 * WARPS)
    page = page_at(pages, index % WARPS * (TOKENS // PAGE) + index // (2 * WARPS))
    token = (index // WARPS % 2 * 8)[:, None] + tl.arange(0, 32)[None, :] // 4
    return tl.load(Scales + (page * heads * PAGE)[:, None] + token)


@triton.jit
def load_keys(k, pages, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Keys of a step, [(16 tokens, 32 channels, half of the tokens, warp), 256] for `key_matrix`.

    `k` is a pointer to a head's first channel, and the strides of pages and tokens.
    """
    HALVES: tl.constexpr = WIDTH // 32 * 2
    index = tl.arange(0, TOKENS // PAGE * HALVES * WARPS)
    page = page_at(pages, index % WARPS * (TOKENS // PAGE) + index // (HALVES * WARPS))
    lane = tl.arange(0, 256)[None, :]
    token = (index // WARPS % 2 * 8)[:, None] + lane // 32
    channel = (index // (2 * WARPS) % (WIDTH // 32) * 32)[:, None] + lane // 8 % 4 * 8 + lane % 8
    return tl.load(k[0] + page[:, None] * k[1] + token * k[2] + channel)


@triton.jit
def key_matrix(x, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Keys [WARPS, TOKENS, WIDTH], their channels in the order of `key_channels`."""
    # (16 tokens, 32 channels, row half, warp, g, t, fragment, column half, column of a pair)
    x = x.reshape(TOKENS // PAGE, WIDTH // 32, 2, WARPS, 8, 4, 2, 2, 2)
    return x.permute(3, 0, 2, 4, 1, 6, 7, 5, 8).reshape(WARPS, TOKENS, WIDTH)


@triton.jit
def key_channels(half, column):
    """Channels of a right side's 8 columns in each half of 16 channels, as `key_matrix` orders them."""
    return half // 4 * 32 + column // 2 * 8 + half % 4 * 2 + column % 2


@triton.jit
def load_values(v, pages, begin, oldest, end, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Values of a step that begins at `begin`, [(16 tokens, 64 channels, one of four tokens, warp), 256].

    In place of one out of [oldest, end) stands the nearest that is not: it will weigh 0, which NaN would survive, and
    what a page holds there is nobody's.
    """
    QUARTERS: tl.constexpr = WIDTH // 64 * 4
    index = tl.arange(0, TOKENS // PAGE * QUARTERS * WARPS)
    number = index % WARPS * (TOKENS // PAGE) + index // (QUARTERS * WARPS)
    page = page_at(pages, number)
    lane = tl.arange(0, 256)[None, :]
    # Of the four tokens of a thread, two neighbours stand in each half of 16.
    quarter = index // WARPS % 4
    token = (quarter // 2 * 8 + quarter % 2)[:, None] + lane // 8 % 4 * 2
    channel = (index // (4 * WARPS) % (WIDTH // 64) * 64)[:, None] + lane // 32 * 8 + lane % 8
    token = begin + (number * PAGE)[:, None] + token
    token = tl.minimum(tl.maximum(token, oldest), end - 1) & (PAGE - 1)
    return tl.load(v[0] + page[:, None] * v[1] + token * v[2] + channel)


@triton.jit
def value_matrix(x, WIDTH: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Values [WARPS, WIDTH, TOKENS], their channels in the order of `value_channels`."""
    # (16 tokens, 64 channels, column half, column of a pair, warp, g, t, fragment, row half)
    x = x.reshape(TOKENS // PAGE, WIDTH // 64, 2, 2, WARPS, 8, 4, 4, 2)
    return x.permute(4, 1, 7, 8, 5, 0, 2, 6, 3).reshape(WARPS, WIDTH, TOKENS)


@triton.jit
def value_channels(WIDTH: tl.constexpr):
    """Channels [WIDTH] of the rows of `value_matrix`."""
    row = tl.arange(0, WIDTH)
    return row // 64 * 64 + row % 8 * 8 + row % 64 // 8
