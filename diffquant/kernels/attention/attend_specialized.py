"""Warp-specialized attention for Hopper (Gluon): half precision, optionally with quantized logits, or 8 bits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="attr-defined,assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from diffquant.kernels.attention.specialized import (
    LOWEST,
    count_key_steps,
    is_noise_map,
    load_tiles,
    new_barriers,
    store_noise_rows,
    store_rows,
    subtract_noise_rows,
    valid_range,
)
from diffquant.kernels.attention.specialized_blocks import attend_blocks, load_row_scales


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@gluon.jit(do_not_specialize=["T", "S"])
def attend_specialized(
    q1, q2, k1, k2, v, lam, starts, ends, weight, top, steps_of_codes, clipped, out, noise_rows,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, T, S, scale, log2e, levels, eps, factor,
    ROUNDED: gl.constexpr, SHIFT: gl.constexpr, NORM: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute causal attention of 128 rows of a pair: q [B, h, T, d], k [B, h_kv, S, d], v [B, h_kv, S, dv].

    MAPS is the number of maps with separate keys (V1: 2, else 1), PACK the number of maps that share keys (V2: 2, else
    1). Strides are of batch, head and position. If logits are ROUNDED, their arguments are those of `attend_rounded`;
    else `scale` includes log2(e).
    """
    QUERIES: gl.constexpr = 128 // PACK
    HALF_TYPE: gl.constexpr = v.dtype.element_ty
    # Under causal order, tiles at the end see the most keys, so they start first.
    tiles = gl.cdiv(T, QUERIES)
    pair = gl.program_id(0) // tiles % pairs
    query = (tiles - 1 - gl.program_id(0) % tiles) * QUERIES
    sequence = (gl.program_id(0) // tiles // pairs).to(gl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    position = query + S - T - start
    whole, steps = count_key_steps(position, gl.minimum(QUERIES, T - query), valid, BN)

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
    # V1's noise map is computed first and stored until the signal map is done.
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
    out_at = sequence * out_strides[0] + pair.to(gl.int64) * out_strides[1]
    lam_stride = 0
    if lam is not None:
        lam += sequence * lam_strides[0] + pair.to(gl.int64) * lam_strides[1]
        lam_stride = lam_strides[2]
    # Rows of the pair's first map precede those of its second.
    rows_at = (gl.program_id(0) // tiles).to(gl.int64) * MAPS * PACK * T
    _attend_tile(
        (lam, weight, top, steps_of_codes, clipped, out + out_at, noise_rows + out_at),
        (lam_stride, out_strides[2], rows_at, T, query, position, T, valid, whole, steps, 0),
        (scale, log2e, levels, eps, factor), buffers,
        (q_sources, k_sources, v_source, q_rows, (0, 0, 0, 0), (0, 0)),
        (ROUNDED, SHIFT, False, NORM, MAPS, PACK), DV, BN, STAGES, (2 * 128 * D, 2 * BN * D, 2 * BN * DV),
    )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "S"])
def attend_fp8_specialized(
    q8, k8, v8, q_scale, k_scale, v_scale, lam, starts, ends, weight, out, noise_rows, lam_strides, out_strides,
    heads, group, T, S, rows, padded, eps, factor,
    NORM: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute causal attention of 128 rows of one pair with Q and K in int8 and V in e4m3.

    Arguments, codes, scales and the arithmetic per key block are those of `attend_int8` with FP8. MAPS is the number of
    maps with separate keys (V1: 2, else 1), PACK the number of maps that share keys (V2: 2, else 1).
    """
    QUERIES: gl.constexpr = 128 // PACK
    # Under causal order, tiles at the end see the most keys, so they start first.
    tiles = rows // 128
    pair = gl.program_id(0) // tiles
    query = (tiles - 1 - gl.program_id(0) % tiles) * QUERIES
    sequence = (pair // heads).to(gl.int64)
    head = pair % heads
    kv = pair // heads * (heads // group) + head // group
    start, valid = valid_range(starts, ends, sequence, S)
    position = query + S - T - start
    whole, steps = count_key_steps(position, gl.minimum(QUERIES, T - query), valid, BN)

    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.int8)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], gl.int8)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DV, BN], gl.float8e4nv)
    q_row = pair.to(gl.int64) * MAPS * rows
    # If maps share keys, their query codes are adjacent rows.
    q_source = tma.make_tensor_descriptor(q8 + q_row * D, [MAPS * rows // PACK, PACK * D], [PACK * D, 1], [64, D], Q)
    k_source = tma.make_tensor_descriptor(
        k8 + kv.to(gl.int64) * MAPS * padded * D, [MAPS * padded, D], [D, 1], [BN, D], K
    )
    v_source = tma.make_tensor_descriptor(v8 + kv.to(gl.int64) * DV * padded, [DV, padded], [padded, 1], [DV, BN], V)
    # The noise map is computed first and stored until the signal map is done.
    noise = (MAPS - 1) * rows + query
    if PACK == 2:
        q_rows = (query, query, query, query)
        q_columns = (0, D, 0, D)
    else:
        q_rows = (noise, noise + 64, query, query + 64)
        q_columns = (0, 0, 0, 0)
    buffers = (
        gl.allocate_shared_memory(gl.int8, [128, D], Q),
        gl.allocate_shared_memory(gl.int8, [STAGES, BN, D], K),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, DV, BN], V),
    )
    out_at = sequence * out_strides[0] + head.to(gl.int64) * out_strides[1]
    lam_stride = 0
    if lam is not None:
        lam += sequence * lam_strides[0] + head.to(gl.int64) * lam_strides[1]
        lam_stride = lam_strides[2]
    _attend_tile(
        (
            lam, weight, q_scale, k_scale + kv * MAPS * (padded // BN), v_scale + kv * DV, out + out_at,
            noise_rows + out_at,
        ),
        (lam_stride, out_strides[2], q_row, rows, query, position, T, valid, whole, steps, padded // BN),
        (1.0, 0.0, 0.0, eps, factor), buffers,
        ((q_source, q_source, q_source, q_source), (k_source, k_source), v_source, q_rows, q_columns,
         ((MAPS - 1) * padded, 0)),
        (False, False, True, NORM, MAPS, PACK), DV, BN, STAGES, (128 * D, BN * D, DV * BN),
    )  # fmt: skip


@gluon.jit
def _attend_tile(
    tensors, sizes, numbers, buffers, sources,
    KIND: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Compute a tile with two warpgroups that compute and one warp that loads."""
    full = (new_barriers(1, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    # Both warpgroups read every buffer.
    free = (new_barriers(1, 2), new_barriers(STAGES, 2), new_barriers(STAGES, 2))
    turns = new_barriers(2, 1)
    # Unused barriers are aliases of used ones instead of being allocated: see `new_barriers`.
    waits = new_barriers(1, 1) if KIND[5] == 2 else full[0]
    fence_async_shared()
    q_sources, k_sources, v_source, q_rows, q_columns, k_rows = sources
    gl.warp_specialize(
        [
            (_attend, (tensors, sizes, numbers, buffers, full, free, waits, turns, 0, KIND, DV, BN, STAGES)),
            (_attend, (tensors, sizes, numbers, buffers, full, free, waits, turns, 1, KIND, DV, BN, STAGES)),
            (
                load_tiles,
                (
                    q_sources, k_sources, v_source, q_rows, q_columns, k_rows, buffers, full, free, sizes[9],
                    KIND[4], BN, STAGES, KIND[2], BYTES,
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
    """Compute the output of one half of the rows, by one warpgroup.

    `tensors[2:5]` are the scales of Q, K and V in 8 bits, or the largest logits, the scales and the counts of clipped
    logits. `sizes` includes the index of the pair's first row and the number of rows per map.
    """
    lam, weight, first_scale, second_scale, third, out, noise_rows = tensors
    lam_stride, out_stride, rows_at, map_rows, query, position, T, valid, whole, steps, key_blocks = sizes
    scale, log2e, levels, eps, factor = numbers
    ROUNDED: gl.constexpr = KIND[0]
    SHIFT: gl.constexpr = KIND[1]
    CODES: gl.constexpr = KIND[2]
    NORM: gl.constexpr = KIND[3]
    MAPS: gl.constexpr = KIND[4]
    PACK: gl.constexpr = KIND[5]
    # Sums of 8-bit codes are added to the accumulators outside the tensor cores, some columns at a time to save
    # registers.
    DH: gl.constexpr = 128 if CODES and DV == 256 else DV
    PARTS: gl.constexpr = DV // DH
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32 if CODES else 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DH, 32 if CODES else 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    first = 0 if PACK == 2 else 64 * HALF
    slot = first + gl.arange(0, 64, layout=ROWS)
    inside = query + slot < T
    sees = inside & (position + slot >= 0) & (position + slot < valid)
    last = gl.where(sees, position + slot + 1, 0)

    row = query + first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
    column = gl.arange(0, DH, layout=gl.SliceLayout(0, VALUES))
    places = row.to(gl.int64)[:, None] * out_stride + column[None, :]
    kept = (row < T)[:, None]
    done = 0
    for own in range(MAPS):
        row_at = rows_at + (HALF if PACK == 2 else MAPS - 1 - own) * map_rows + query + slot
        if ROUNDED:
            rows = load_row_scales(first_scale, second_scale, row_at, inside, SHIFT, ROWS)
        elif CODES:
            # Queries of maps that share keys are adjacent rows.
            q_at = rows_at + (query + slot) * 2 + HALF if PACK == 2 else row_at
            row_scale = gl.load(first_scale + q_at, mask=sees, other=0.0)
            rows = (row_scale, second_scale + (MAPS - 1 - own) * key_blocks)
        else:
            rows = (scale, scale)
        y = ()
        for _ in gl.static_range(PARTS):
            y += (gl.full([64, DH], 0.0, gl.float32, VALUES),)
        mbarrier.wait(full[0].index(0), own & 1)
        y, total, below = attend_blocks(
            buffers, full, free, turns, (scale, log2e, levels), rows, last, y,
            gl.full([64], LOWEST, gl.float32, ROWS), done, own, whole, steps, KIND, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        if SHIFT:
            gl.store(third + row_at, below, mask=inside)
        done += steps
        mbarrier.arrive(free[0].index(0), count=1)
        seeing = gl.convert_layout(sees, gl.SliceLayout(1, VALUES))[:, None]
        part = gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, VALUES))[:, None]
        values = ()
        for i in gl.static_range(PARTS):
            # Selected instead of multiplied by 0: rounded weights of a row without visible keys may be infinite.
            value = gl.where(seeing, y[i] * part, 0.0)
            if CODES:
                value *= gl.load(third + i * DH + column)[None, :]
            values += (value,)
        if is_noise_map(own, T, HALF, MAPS, PACK):
            for i in gl.static_range(PARTS):
                store_noise_rows(values[i], noise_rows + i * DH + places, kept)
        else:
            if PACK == 2:
                # The other warpgroup computed the noise map.
                mbarrier.wait(waits.index(0), 0)
            squares = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, VALUES))
            if MAPS * PACK == 2:
                second = gl.load(lam + row * lam_stride, mask=row < T, other=0.0)
            differences = ()
            for i in gl.static_range(PARTS):
                value = values[i]
                if MAPS * PACK == 2:
                    value = subtract_noise_rows(value, noise_rows + i * DH + places, kept, second)
                squares += gl.sum(value * value, 1)
                differences += (value,)
            for i in gl.static_range(PARTS):
                at = out + i * DH + places
                store_rows(differences[i], squares, at, kept, weight, i * DH + column, eps, factor, NORM, DV)
    if PACK * HALF == 2:
        mbarrier.arrive(waits.index(0), count=1)
