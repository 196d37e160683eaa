"""The first kernel of `decode_latent`: partial sums of attention over one share of a store's latents.

A program has as many rows, of both maps and any head, as its registers hold sums of: all of them read the same keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST
from diffquant.kernels.cache.kv_layout import packed_tokens, stored_head, waiting
from diffquant.kernels.cache.latent_span import latent_span


@triton.jit(do_not_specialize=["window", "one"])
def latent_share(
    Q1, Q2, q1_stride, q2_stride, KCodes, KTop, KScales, KRecent, VCodes, VTop, VScales, VRecent,
    Progress, Starts, Ends, Largest, Total, Acc, scale, window, capacity, pairs, noises, queries, tiles, one,
    RESIDUAL: tl.constexpr, TURNED: tl.constexpr, LATENT: tl.constexpr,
    K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr, V_BITS: tl.constexpr, V_RING: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Maxima, sums and weighted latents of a program's rows over its keys.

    Programs are (sequence and tile of rows, share): those that read the same keys run side by side. Rows are ordered
    map, query head, query. `scale` includes log2(e); `one` is 1, which the compiler must not know.
    """
    sequence = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    length = tl.load(Progress)
    position = length - queries + row % queries
    first = tl.zeros([ROWS], tl.int32)
    begin = 0
    if Starts is not None:
        begin = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
        first += begin
    if Ends is not None:
        # A query beyond the valid range is padding itself; no other sees so far.
        first = tl.where(position < tl.load(Ends + sequence), first, length)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        begin = tl.maximum(begin, length - queries - window + 1)
    begin = begin // TOKENS * TOKENS
    share = tl.cdiv(tl.cdiv(length - begin, TOKENS), tl.num_programs(1)) * TOKENS
    begin += tl.program_id(1) * share
    end = tl.minimum(begin + share, length)
    k_packed = packed_tokens(length, tl.load(Progress + 1), K_BITS, K_BLOCK, RESIDUAL)
    v_packed = packed_tokens(length, tl.load(Progress + 2), V_BITS, 1, RESIDUAL)

    q, q_turned = _queries(Q1, q1_stride, sequence, row, pairs, queries, TURNED, LATENT)
    if Q2 is not None:
        noise, noise_turned = _queries(Q2, q2_stride, sequence, row - pairs * queries, noises, queries, TURNED, LATENT)
        q += noise
        q_turned += noise_turned
    k = stored_head(KCodes, KTop, KScales, sequence, capacity, K_BITS, K_BLOCK, TURNED)
    v = stored_head(VCodes, VTop, VScales, sequence, capacity, V_BITS, 1, LATENT)
    sums = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, LATENT], tl.float32)
    sums = latent_span(
        sums, q, q_turned, first, position, begin, tl.minimum(end, tl.minimum(k_packed, v_packed)), k, v, scale, one,
        K_BITS, K_BLOCK, 0, V_BITS, 0, TURNED, LATENT, TOKENS,
    )  # fmt: skip
    if K_RING:
        k = waiting(KRecent + sequence * (K_RING * TURNED))
        # Blocks leave the keys' window whole: latents may be packed, or have no window, where keys wait.
        sums = latent_span(
            sums, q, q_turned, first, position, tl.maximum(begin, k_packed), tl.minimum(end, v_packed), k, v,
            scale, one, 16, 1, K_RING, V_BITS, 0, TURNED, LATENT, TOKENS,
        )  # fmt: skip
    if V_RING:
        v = waiting(VRecent + sequence * (V_RING * LATENT))
        sums = latent_span(
            sums, q, q_turned, first, position, tl.maximum(begin, v_packed), end, k, v, scale, one,
            16, 1, K_RING, 16, V_RING, TURNED, LATENT, TOKENS,
        )  # fmt: skip

    largest, total, acc = sums
    tile = tl.program_id(0).to(tl.int64)
    out = (tile * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, largest)
    tl.store(Total + out, total)
    tl.store(Acc + out[:, None] * LATENT + tl.arange(0, LATENT)[None, :], acc)


@triton.jit
def _queries(Q, stride, sequence, row, heads, queries, TURNED: tl.constexpr, LATENT: tl.constexpr):
    """Queries of rows for the latents and for the turned channels behind them; 0 but for those of one map's heads."""
    at = Q + sequence * stride[0] + (row // queries * stride[1] + row % queries * stride[2])[:, None]
    here = ((row >= 0) & (row < heads * queries))[:, None]
    q = tl.load(at + tl.arange(0, LATENT)[None, :], mask=here, other=0.0)
    return q, tl.load(at + LATENT + tl.arange(0, TURNED)[None, :], mask=here, other=0.0)
