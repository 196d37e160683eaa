"""The second kernel of `decode`, which combines the shares of the keys and applies λ and the pair norm."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST, pair_norm


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["queries", "shares", "tiles"])
def decode_combine(
    Largest, Total, Acc, Lam, Weight, Out, lam_stride, out_stride, pairs, group, noise_group, queries,
    shares, tiles, eps, factor,
    NORM: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Output of one query of one pair."""
    query = tl.program_id(0) % queries
    pair = tl.program_id(0) // queries % pairs
    sequence = (tl.program_id(0) // queries // pairs).to(tl.int64)
    first_tile = (sequence * (pairs // group) + pair // group) * tiles
    row = pair % group * queries + query
    out = _whole(Largest, Total, Acc, first_tile, row, shares, ROWS, SHARES, VALUE_WIDTH)
    if Lam is not None:
        lam = tl.load(Lam + sequence * lam_stride[0] + pair * lam_stride[1] + query * lam_stride[2])
        row = (group + pair % group // (group // noise_group)) * queries + query
        out -= lam * _whole(Largest, Total, Acc, first_tile, row, shares, ROWS, SHARES, VALUE_WIDTH)
    if NORM:
        out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    at = Out + sequence * out_stride[0] + pair * out_stride[1] + query * out_stride[2]
    tl.store(at + column, out.to(Out.dtype.element_ty))


@triton.jit
def _whole(
    Largest, Total, Acc, first_tile, row, shares,
    ROWS: tl.constexpr, SHARES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Attention softmax(Q·Kᵀ·scale)·V of one row, [1, VALUE_WIDTH]; 0 where it saw nothing."""
    first = (first_tile + row // ROWS) * shares * ROWS + row % ROWS
    share = tl.arange(0, SHARES)
    of_all = tl.load(Largest + first + share * ROWS, mask=share < shares, other=LOWEST)
    largest = tl.max(of_all, 0)
    total = tl.sum(tl.load(Total + first + share * ROWS, mask=share < shares, other=0.0) * tl.exp2(of_all - largest), 0)
    STEP: tl.constexpr = 16 if SHARES > 16 else SHARES
    out = tl.zeros([VALUE_WIDTH], tl.float32)
    for begin in range(0, shares, STEP):
        some = begin + tl.arange(0, STEP)
        at = first + some * ROWS
        weight = tl.exp2(tl.load(Largest + at, mask=some < shares, other=LOWEST) - largest)
        # A share that saw nothing weighs nothing: its values need not be read.
        read = (some < shares) & (weight > 0)
        column = tl.arange(0, VALUE_WIDTH)[None, :]
        values = tl.load(Acc + at[:, None] * VALUE_WIDTH + column, mask=read[:, None], other=0.0)
        out += tl.sum(values * weight[:, None], 0)
    return (out * tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total)))[None, :]
