"""Differential attention of many queries where a pair's maps share their keys (V2).

A pair's two queries are two rows of one tile, so K and V are read once for both maps, as in a plain
Transformer with twice the queries; λ weighs the rows' difference at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from diffquant.kernels.attention.online import at, attend_tile, pair_norm, valid_range


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["queries", "keys", "window", "lam_strides"])
def prefill_v2(
    Q1, Q2, K, V, Lam, Out, Starts, Ends, Weight,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, queries, keys, window, scale, eps, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Output of `prefill_v1`'s arguments with one K [B, h_kv, S, d]; a tile of ROWS rows holds ROWS / 2 queries."""
    held: tl.constexpr = ROWS // 2
    VALUE_WIDTH: tl.constexpr = PART * PARTS
    tiles = tl.cdiv(queries, held)
    # The last tiles see most keys and start first.
    top = (tiles - 1 - tl.program_id(0) % tiles) * held
    pair = tl.program_id(0) // tiles % pairs
    sequence = tl.program_id(0) // tiles // pairs
    start, valid = valid_range(Starts, Ends, sequence, keys)
    offset = keys - queries - start
    last = tl.minimum(top + held, queries) - 1 + offset

    # Rows come in eights: eight signal queries, then their noise queries. Tensor cores leave rows r and
    # r + 8 of sixteen in one thread, which can subtract them without asking another.
    slot = tl.arange(0, ROWS)
    query = slot // 16 * 8 + slot % 8
    is_noise = slot // 8 % 2 == 1
    row = top + query

    kv_pair = pair // group
    spot = at(q_strides, sequence, pair, row)[:, None] + tl.arange(0, WIDTH)[None, :]
    noise = tl.load(Q2 + spot, mask=((row < queries) & is_noise)[:, None], other=0.0)
    # Arithmetic between load and product would keep q in registers, where the accumulator needs the room.
    q = tl.load(Q1 + spot, mask=((row < queries) & ~is_noise)[:, None], other=noise)

    k = K + at(k_strides, sequence, kv_pair, start)
    values = V + at(v_strides, sequence, kv_pair, start)
    if DESCRIBED:
        k = tl.make_tensor_descriptor(k, [valid, WIDTH], [k_strides[2], 1], [STEP, WIDTH])
        values = tl.make_tensor_descriptor(values, [valid, VALUE_WIDTH], [v_strides[2], 1], [STEP, PART])
    both = attend_tile(
        q, k, values, k_strides[2], v_strides[2], top + offset, last, row + offset, valid, window, scale,
        CAUSAL, WINDOW, DESCRIBED, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip

    both = both.reshape(ROWS // 16, 2, 8, VALUE_WIDTH).permute(0, 2, 3, 1)
    signal, noise = tl.split(both)
    signal = signal.reshape(held, VALUE_WIDTH)
    noise = noise.reshape(held, VALUE_WIDTH)
    row = top + tl.arange(0, held)
    lam = tl.load(Lam + at(lam_strides, sequence, pair, row), mask=row < queries, other=0.0)
    out = signal - lam[:, None] * noise
    if NORM:
        out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
    places = Out + at(out_strides, sequence, pair, top)
    places += tl.arange(0, held)[:, None] * out_strides[2] + tl.arange(0, VALUE_WIDTH)[None, :]
    tl.store(places, out.to(Out.dtype.element_ty), mask=(row < queries)[:, None])
