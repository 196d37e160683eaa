"""Triton functions that attention kernels share: what a tile's rows see."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl


@triton.jit
def seen_by(queries, start, end, window, T, S, CAUSAL: tl.constexpr):
    """Each query sees the keys from `first` up to, and not including, `last`; 0 and 0 where it sees none."""
    position = queries + (S - T)
    first = tl.zeros_like(queries) + start
    last = tl.zeros_like(queries) + end
    exists = queries < T
    if CAUSAL:
        exists = exists & (position >= start) & (position < end)
        last = tl.minimum(last, position + 1)
        if window is not None:
            first = tl.maximum(first, position - window + 1)
    sees = exists & (first < last)
    return tl.where(sees, first, 0), tl.where(sees, last, 0)


@triton.jit
def key_blocks(first, last, S, BN: tl.constexpr):
    """Key blocks a tile visits: partly hidden ones from `begin` to `inner` and from `outer` to `stop`, whole ones between.

    All but `stop` are multiples of BN. Rows that see nothing do not count: what they become is not kept.
    """
    sees = first < last
    begin = tl.min(tl.where(sees, first, S)) // BN * BN
    stop = tl.max(last)
    inner = tl.cdiv(tl.max(first), BN) * BN
    inner = tl.minimum(tl.maximum(inner, begin), tl.cdiv(stop, BN) * BN)
    outer = tl.maximum(tl.min(tl.where(sees, last, S)) // BN * BN, inner)
    return begin, inner, outer, stop
