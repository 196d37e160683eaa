"""The keys that a tile's rows see, as Triton functions; `valid` keys count from a sequence's first valid one."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl


@triton.jit
def seen_by(query, queries, offset, valid, window, CAUSAL: tl.constexpr):
    """The keys that each query sees: from `first` up to, and not including, `last`; 0 and 0 where it sees none.

    `offset` is the position of query 0 among the keys.
    """
    position = query + offset
    first = tl.zeros_like(query)
    last = tl.zeros_like(query) + valid
    sees = query < queries
    if CAUSAL:
        # A query outside the valid range is padding itself.
        sees = sees & (position >= 0) & (position < valid)
        last = tl.minimum(last, position + 1)
        if window is not None:
            first = tl.maximum(first, position - window + 1)
    return tl.where(sees, first, 0), tl.where(sees, last, 0)


@triton.jit
def key_blocks(first, last, valid, BN: tl.constexpr):
    """Key blocks that a tile visits: whole ones from `inner` to `outer`, partly hidden ones from `begin` and to `stop`.

    All but `stop` are multiples of BN. Rows that see nothing do not count: what they become is not kept.
    """
    sees = first < last
    begin = tl.min(tl.where(sees, first, valid)) // BN * BN
    stop = tl.max(last)
    inner = tl.cdiv(tl.max(first), BN) * BN
    inner = tl.minimum(tl.maximum(inner, begin), tl.cdiv(stop, BN) * BN)
    outer = tl.maximum(tl.min(tl.where(sees, last, valid)) // BN * BN, inner)
    return begin, inner, outer, stop
