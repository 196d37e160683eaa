"""Differential attention of many queries where each map has keys of its own (V1).

One map runs to its end and is parked in the output's memory, then the other follows and the two combine: two
accumulators of a tile would not fit in registers at d = 128, and V is twice as wide as K.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from diffquant.kernels.attention.online import at, attend_tile, load_rows, pair_norm, to_float16, valid_range


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["queries", "keys", "window", "lam_strides"])
def prefill_v1(
    Q1, Q2, K1, K2, V, Lam, Out, Parked, Starts, Ends, Weight,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, queries, keys, window, scale, eps, factor,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Output [B, h, T, dv] of q [B, h, T, d], k [B, h_kv, S, d], v [B, h_kv, S, dv], λ [B, h, T], a tile a program.

    Strides are in elements, of batch, head and position; `scale` is times log2(e).
    """
    VALUE_WIDTH: tl.constexpr = PART * PARTS
    tiles = tl.cdiv(queries, ROWS)
    # The last tiles see most keys and start first.
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = tl.program_id(0) // tiles % pairs
    sequence = tl.program_id(0) // tiles // pairs
    start, valid = valid_range(Starts, Ends, sequence, keys)
    offset = keys - queries - start
    row = top + tl.arange(0, ROWS)
    position = row + offset
    last = tl.minimum(top + ROWS, queries) - 1 + offset

    kv_pair = pair // group
    lam = tl.load(Lam + at(lam_strides, sequence, pair, row), mask=row < queries, other=0.0)
    places = at(out_strides, sequence, pair, top)
    places += tl.arange(0, ROWS)[:, None] * out_strides[2] + tl.arange(0, VALUE_WIDTH)[None, :]
    inside = (row < queries)[:, None]

    values = V + at(v_strides, sequence, kv_pair, start)
    if DESCRIBED:
        values = tl.make_tensor_descriptor(values, [valid, VALUE_WIDTH], [v_strides[2], 1], [STEP, PART])
    for is_signal in tl.range(0, 2, num_stages=1):
        k = (K1 if is_signal else K2) + at(k_strides, sequence, kv_pair, start)
        if DESCRIBED:
            k = tl.make_tensor_descriptor(k, [valid, WIDTH], [k_strides[2], 1], [STEP, WIDTH])
        q = (Q1 if is_signal else Q2) + at(q_strides, sequence, pair, top)
        q = load_rows(q, 0, 0, queries - top, q_strides[2], ROWS, WIDTH, False, True)
        out = attend_tile(
            q, k, values, k_strides[2], v_strides[2], top + offset, last, position, valid, window, scale,
            CAUSAL, WINDOW, DESCRIBED, STEP, WIDTH, PART, PARTS,
        )  # fmt: skip
        if is_signal:
            # A thread may read back what another one parked.
            tl.debug_barrier()
            out -= tl.load(Parked + places, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
            tl.store(Out + places, out.to(Out.dtype.element_ty), mask=inside)
        else:
            # In fp16 whatever the output's type: bfloat16 would lose what the difference keeps.
            tl.store(Parked + places, to_float16(out * lam[:, None]), mask=inside)
