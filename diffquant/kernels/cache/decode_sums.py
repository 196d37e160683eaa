"""A program's maxima, sums and weighted values while `decode` reads its share of the keys, a part for each warp."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.kv_layout import field_channels
from diffquant.kernels.cache.paged_rows import value_channels


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
