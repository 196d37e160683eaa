"""Attention in half precision on Hopper, its warps specialized (Gluon), its logits as they are or rounded to codes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from diffquant.kernels.attention.softmax_pipelined import attend_softmax_pipelined
from diffquant.kernels.attention.specialized import (
    LOWEST,
    keep,
    key_steps,
    less_parked,
    load_tiles,
    new_barriers,
    park,
    valid_keys,
    waits_for_signal,
)
from diffquant.kernels.attention.specialized_rounding import attend_rounded_blocks, row_codes
from diffquant.kernels.attention.specialized_softmax import attend_softmax_blocks


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@gluon.jit(do_not_specialize=["T", "S"])
def attend_specialized(
    q1, q2, k1, k2, v, lam, starts, ends, weight, top, steps_of_codes, clipped, out, parked,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, T, S, scale, log2e, levels, eps, factor,
    ROUNDED: gl.constexpr, SHIFT: gl.constexpr, NORM: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PIPELINED: gl.constexpr,
):  # fmt: skip
    """Causal attention of a tile of 128 rows of one pair: q [B, h, T, d], k [B, h_kv, S, d], v [B, h_kv, S, dv].

    MAPS have keys of their own (V1: 2) or PACK share them (V2: 2); the other is 1. Strides are of batch, head and
    position; `scale` is times log2(e) where logits are not ROUNDED. Where they are, to scales that `extremes` led to,
    the rest is as in `attend_rounded`.
    """
    QUERIES: gl.constexpr = 128 // PACK
    HALF_TYPE: gl.constexpr = v.dtype.element_ty
    # Under causal order the last tiles see most: they start first.
    tiles = gl.cdiv(T, QUERIES)
    pair = gl.program_id(0) // tiles % pairs
    query = (tiles - 1 - gl.program_id(0) % tiles) * QUERIES
    sequence = (gl.program_id(0) // tiles // pairs).to(gl.int64)
    start, valid = valid_keys(starts, ends, sequence, S)
    position = query + S - T - start
    whole, steps = key_steps(position, gl.minimum(QUERIES, T - query), valid, BN)

    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], HALF_TYPE)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], HALF_TYPE)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DV], HALF_TYPE)
    q_at = sequence * q_strides[0] + pair.to(gl.int64) * q_strides[1]
    kv = (pair // group).to(gl.int64)
    k_at = sequence * k_strides[0] + kv * k_strides[1] + start * k_strides[2]
    v_at = sequence * v_strides[0] + kv * v_strides[1] + start * v_strides[2]
    signal = tma.make_tensor_descriptor(q1 + q_at, [T, D], [q_strides[2], 1], [64, D], Q)
    noise = tma.make_tensor_descriptor(q2 + q_at, [T, D], [q_strides[2], 1], [64, D], Q)
    signal_keys = tma.make_tensor_descriptor(k1 + k_at, [valid, D], [k_strides[2], 1], [BN, D], K)
    noise_keys = tma.make_tensor_descriptor(k2 + k_at, [valid, D], [k_strides[2], 1], [BN, D], K)
    v_source = tma.make_tensor_descriptor(v + v_at, [valid, DV], [v_strides[2], 1], [BN, DV], V)
    # V1's noise map comes first and waits.
    if PACK == 2:
        q_sources = (signal, noise, signal, noise)
        q_rows = (query, query, query, query)
        k_sources = (signal_keys, signal_keys)
    else:
        q_sources = (noise, noise, signal, signal)
        q_rows = (query, query + 64, query, query + 64)
        k_sources = (noise_keys, signal_keys)
    buffers = (
        gl.allocate_shared_memory(HALF_TYPE, [128, D], Q),
        gl.allocate_shared_memory(HALF_TYPE, [STAGES, BN, D], K),
        gl.allocate_shared_memory(HALF_TYPE, [STAGES, BN, DV], V),
    )
    full = (new_barriers(1, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    # Both warpgroups read every buffer.
    free = (new_barriers(1, 2), new_barriers(STAGES, 2), new_barriers(STAGES, 2))
    # What no partition waits for is not made, and names stand for others: see `new_barriers`.
    waits = new_barriers(1, 1) if PACK == 2 else full[0]
    turns = new_barriers(2, 1) if PIPELINED else full[0]
    fence_async_shared()

    out_at = sequence * out_strides[0] + pair.to(gl.int64) * out_strides[1]
    lam_stride = 0
    if lam is not None:
        lam += sequence * lam_strides[0] + pair.to(gl.int64) * lam_strides[1]
        lam_stride = lam_strides[2]
    # Rows of the maps of a pair, one after the other.
    rows_at = (gl.program_id(0) // tiles).to(gl.int64) * MAPS * PACK * T
    tensors = (lam, weight, top, steps_of_codes, clipped, out + out_at, parked + out_at)
    sizes = (lam_stride, out_strides[2], rows_at, query, position, T, valid, whole, steps)
    numbers = (scale, log2e, levels, eps, factor)
    KIND: gl.constexpr = (ROUNDED, SHIFT, NORM, MAPS, PACK, PIPELINED)
    BYTES: gl.constexpr = (2 * 128 * D, 2 * BN * D, 2 * BN * DV)
    gl.warp_specialize(
        [
            (_attend, (tensors, sizes, numbers, buffers, full, free, waits, turns, 0, KIND, DV, BN, STAGES)),
            (_attend, (tensors, sizes, numbers, buffers, full, free, waits, turns, 1, KIND, DV, BN, STAGES)),
            (
                load_tiles,
                (
                    q_sources, k_sources, v_source, q_rows, (0, 0, 0, 0), (0, 0), buffers, full, free, steps,
                    MAPS, BN, STAGES, False, BYTES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _attend(
    tensors, sizes, numbers, buffers, full, free, waits, turns,
    HALF: gl.constexpr, KIND: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output of one half of the rows, by one warpgroup."""
    lam, weight, top, steps_of_codes, clipped, out, parked = tensors
    lam_stride, out_stride, rows_at, query, position, T, valid, whole, steps = sizes
    scale, log2e, levels, eps, factor = numbers
    ROUNDED: gl.constexpr = KIND[0]
    SHIFT: gl.constexpr = KIND[1]
    NORM: gl.constexpr = KIND[2]
    MAPS: gl.constexpr = KIND[3]
    PACK: gl.constexpr = KIND[4]
    PIPELINED: gl.constexpr = KIND[5]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    first = 0 if PACK == 2 else 64 * HALF
    slot = first + gl.arange(0, 64, layout=ROWS)
    inside = query + slot < T
    sees = inside & (position + slot >= 0) & (position + slot < valid)
    last = gl.where(sees, position + slot + 1, 0)

    row = query + first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
    column = gl.arange(0, DV, layout=gl.SliceLayout(0, VALUES))
    places = row.to(gl.int64)[:, None] * out_stride + column[None, :]
    kept = (row < T)[:, None]
    done = 0
    for own in range(MAPS):
        total = gl.full([64], 0.0, gl.float32, ROWS)
        y = gl.full([64, DV], 0.0, gl.float32, VALUES)
        mbarrier.wait(full[0].index(0), own & 1)
        if ROUNDED:
            row_at = rows_at + (HALF if PACK == 2 else MAPS - 1 - own) * T + query + slot
            codes = row_codes(top, steps_of_codes, row_at, inside, SHIFT, ROWS)
            below = gl.full([64], 0, gl.int32, ROWS)
            y, total, below = attend_rounded_blocks(
                buffers, full, free, scale, codes, last, y, total, below, log2e, levels, done, 0, whole,
                False, SHIFT, HALF, BN, STAGES, LOGITS, VALUES,
            )  # fmt: skip
            y, total, below = attend_rounded_blocks(
                buffers, full, free, scale, codes, last, y, total, below, log2e, levels, done, whole, steps,
                True, SHIFT, HALF, BN, STAGES, LOGITS, VALUES,
            )  # fmt: skip
            if SHIFT:
                gl.store(clipped + row_at, below, mask=inside)
        elif PIPELINED:
            largest = gl.full([64], LOWEST, gl.float32, ROWS)
            y, largest, total = attend_softmax_pipelined(
                buffers, full, free, turns, scale, last, y, largest, total, done, own, whole, steps,
                HALF, BN, STAGES, LOGITS, VALUES,
            )  # fmt: skip
        else:
            largest = gl.full([64], LOWEST, gl.float32, ROWS)
            y, largest, total = attend_softmax_blocks(
                buffers, full, free, scale, last, y, largest, total, done, 0, whole,
                False, HALF, BN, STAGES, LOGITS, VALUES,
            )  # fmt: skip
            y, largest, total = attend_softmax_blocks(
                buffers, full, free, scale, last, y, largest, total, done, whole, steps,
                True, HALF, BN, STAGES, LOGITS, VALUES,
            )  # fmt: skip
        done += steps
        mbarrier.arrive(free[0].index(0), count=1)
        part = gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, VALUES))
        # Chosen and not multiplied: rounded weights of a row that sees nothing may be infinite.
        y = gl.where(gl.convert_layout(sees, gl.SliceLayout(1, VALUES))[:, None], y * part[:, None], 0.0)
        if waits_for_signal(own, T, HALF, MAPS, PACK):
            park(y, parked + places, kept)
        else:
            if PACK == 2:
                # The other warpgroup has the noise map.
                mbarrier.wait(waits.index(0), 0)
            if MAPS * PACK == 2:
                y = less_parked(y, parked + places, kept, gl.load(lam + row * lam_stride, mask=row < T, other=0.0))
            keep(y, gl.sum(y * y, 1), out + places, kept, weight, column, eps, factor, NORM, DV)
    if PACK * HALF == 2:
        mbarrier.arrive(waits.index(0), count=1)
