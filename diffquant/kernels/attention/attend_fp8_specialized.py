"""Attention over 8-bit codes of Q, K and V on Hopper, its warps specialized (Gluon).

The codes, their scales and the arithmetic of a key block are those of `attend_int8`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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

# log2 of e4m3's largest number: probabilities are stored times 448 and use all of its range.
_E4M3_TOP = gl.constexpr(8.807354922057604)


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@gluon.jit(do_not_specialize=["T", "S"])
def attend_fp8_specialized(
    q8, k8, v8, q_scale, k_scale, v_scale, lam, starts, ends, weight, out, parked, lam_strides, out_strides,
    heads, group, T, S, rows, padded, eps, factor,
    NORM: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Causal attention of a tile of 128 rows of one pair, with `attend_int8`'s arguments and V in e4m3.

    MAPS have keys of their own (V1: 2) or PACK share them (V2: 2); the other is 1.
    """
    QUERIES: gl.constexpr = 128 // PACK
    # Under causal order the last tiles see most: they start first.
    tiles = rows // 128
    pair = gl.program_id(0) // tiles
    query = (tiles - 1 - gl.program_id(0) % tiles) * QUERIES
    sequence = (pair // heads).to(gl.int64)
    head = pair % heads
    kv = pair // heads * (heads // group) + head // group
    start, valid = valid_keys(starts, ends, sequence, S)
    position = query + S - T - start
    whole, steps = key_steps(position, gl.minimum(QUERIES, T - query), valid, BN)

    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.int8)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], gl.int8)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DV, BN], gl.float8e4nv)
    q_row = pair.to(gl.int64) * MAPS * rows
    # A row of the codes holds a query's maps that share keys, side by side.
    q_source = tma.make_tensor_descriptor(q8 + q_row * D, [MAPS * rows // PACK, PACK * D], [PACK * D, 1], [64, D], Q)
    k_source = tma.make_tensor_descriptor(
        k8 + kv.to(gl.int64) * MAPS * padded * D, [MAPS * padded, D], [D, 1], [BN, D], K
    )
    v_source = tma.make_tensor_descriptor(v8 + kv.to(gl.int64) * DV * padded, [DV, padded], [padded, 1], [DV, BN], V)
    # The noise map comes first and waits.
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
    full = (new_barriers(1, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    # Both warpgroups read every buffer.
    free = (new_barriers(1, 2), new_barriers(STAGES, 2), new_barriers(STAGES, 2))
    waits = new_barriers(1, 1) if PACK == 2 else full[0]
    fence_async_shared()

    out_at = sequence * out_strides[0] + head.to(gl.int64) * out_strides[1]
    lam_stride = 0
    if lam is not None:
        lam += sequence * lam_strides[0] + head.to(gl.int64) * lam_strides[1]
        lam_stride = lam_strides[2]
    tensors = (
        q_scale + q_row, k_scale + kv * MAPS * (padded // BN), v_scale + kv * DV, lam, weight, out + out_at,
        parked + out_at,
    )  # fmt: skip
    sizes = (lam_stride, out_strides[2], query, position, T, valid, rows, padded // BN, whole, steps)
    norm = (eps, factor)
    k_rows = ((MAPS - 1) * padded, 0)
    q_sources = (q_source, q_source, q_source, q_source)
    BYTES: gl.constexpr = (128 * D, BN * D, DV * BN)
    gl.warp_specialize(
        [
            (_attend, (tensors, sizes, norm, buffers, full, free, waits, 0, NORM, MAPS, PACK, DV, BN, STAGES)),
            (_attend, (tensors, sizes, norm, buffers, full, free, waits, 1, NORM, MAPS, PACK, DV, BN, STAGES)),
            (
                load_tiles,
                (
                    q_sources, (k_source, k_source), v_source, q_rows, q_columns, k_rows, buffers, full, free, steps,
                    MAPS, BN, STAGES, True, BYTES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _attend(
    tensors, sizes, norm, buffers, full, free, waits,
    HALF: gl.constexpr, NORM: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Output of one half of the rows, by one warpgroup."""
    q_scale, k_scale, v_scale, lam, weight, out, parked = tensors
    lam_stride, out_stride, query, position, T, valid, rows, key_blocks, whole, steps = sizes
    eps, factor = norm
    HALVES: gl.constexpr = 2 if DV == 256 else 1
    DH: gl.constexpr = DV // HALVES
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DH, 32])
    first = 0 if PACK == 2 else 64 * HALF
    slot = first + gl.arange(0, 64, layout=gl.SliceLayout(1, LOGITS))
    sees = (query + slot < T) & (position + slot >= 0) & (position + slot < valid)
    last = gl.where(sees, position + slot + 1, 0)

    row = query + first + gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
    column = gl.arange(0, DH, layout=gl.SliceLayout(0, VALUES))
    places = row.to(gl.int64)[:, None] * out_stride + column[None, :]
    kept = (row < T)[:, None]
    done = 0
    for own in range(MAPS):
        q_at = (query + slot) * 2 + HALF if PACK == 2 else (MAPS - 1 - own) * rows + query + slot
        row_scale = gl.load(q_scale + q_at, mask=sees, other=0.0)
        scales = k_scale + (MAPS - 1 - own) * key_blocks
        top = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
        low = gl.full([64, DH], 0.0, gl.float32, VALUES)
        high = gl.full([64, DH], 0.0, gl.float32, VALUES)
        mbarrier.wait(full[0].index(0), own & 1)
        low, high, top, total = _through(
            buffers, full, free, scales, row_scale, last, low, high, top, total, done, 0, whole,
            False, HALF, DV, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        low, high, top, total = _through(
            buffers, full, free, scales, row_scale, last, low, high, top, total, done, whole, steps,
            True, HALF, DV, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        done += steps
        mbarrier.arrive(free[0].index(0), count=1)
        part = gl.where(sees, 1.0 / gl.where(total == 0, 1.0, total), 0.0)
        part = gl.convert_layout(part, gl.SliceLayout(1, VALUES))[:, None]
        low = low * part * gl.load(v_scale + column)[None, :]
        if HALVES == 2:
            high = high * part * gl.load(v_scale + DH + column)[None, :]
        if waits_for_signal(own, T, HALF, MAPS, PACK):
            park(low, parked + places, kept)
            if HALVES == 2:
                park(high, parked + DH + places, kept)
        else:
            if PACK == 2:
                # The other warpgroup has the noise map.
                mbarrier.wait(waits.index(0), 0)
            if MAPS * PACK == 2:
                second = gl.load(lam + row * lam_stride, mask=row < T, other=0.0)
                low = less_parked(low, parked + places, kept, second)
                if HALVES == 2:
                    high = less_parked(high, parked + DH + places, kept, second)
            squares = gl.sum(low * low, 1)
            if HALVES == 2:
                squares += gl.sum(high * high, 1)
            keep(low, squares, out + places, kept, weight, column, eps, factor, NORM, DV)
            if HALVES == 2:
                keep(high, squares, out + DH + places, kept, weight, DH + column, eps, factor, NORM, DV)
    if PACK * HALF == 2:
        mbarrier.arrive(waits.index(0), count=1)


@gluon.jit
def _through(
    buffers, full, free, scales, row_scale, last, low, high, top, total, done, begin, stop,
    MASKED: gl.constexpr, HALF: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """State of an online softmax after the key blocks from `begin` up to `stop` more."""
    DH: gl.constexpr = low.shape[1]
    q = buffers[0].slice(64 * HALF, 64)
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        phase = (done + step) // STAGES & 1
        scale = row_scale * gl.load(scales + step)
        mbarrier.wait(full[1].index(stage), phase)
        nothing = gl.full([64, BN], 0, gl.int32, LOGITS)
        logits = warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        logits = logits.to(gl.float32)
        if MASKED:
            key = step * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
            logits = gl.where(key[None, :] < last[:, None], logits * scale[:, None], -float("inf"))
            risen = gl.maximum(top, gl.max(logits, 1))
            p = gl.exp2(logits - (risen - _E4M3_TOP)[:, None])
        else:
            risen = gl.maximum(top, gl.max(logits, 1) * scale)
            p = gl.exp2(logits * scale[:, None] - (risen - _E4M3_TOP)[:, None])
        shrunk = gl.exp2(top - risen)
        total = total * shrunk + gl.sum(p, 1)
        top = risen
        # The order of `quantize_qkv.swizzled`: what a thread holds of the result is what it holds of the operand.
        codes = p.to(gl.float8e4nv).reshape([64, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, BN])
        codes = gl.convert_layout(codes, gl.DotOperandLayout(0, VALUES, 4))
        shrunk = gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES))[:, None]
        values = buffers[2].index(stage)
        mbarrier.wait(full[2].index(stage), phase)
        # Sums of 128 keys leave the tensor cores, whose own additions keep about 14 bits.
        low = low * shrunk + _product(codes, values.slice(0, DH), VALUES)
        if DV > DH:
            high = high * shrunk + _product(codes, values.slice(DH, DH), VALUES)
        mbarrier.arrive(free[2].index(stage), count=1)
    return low, high, top, total


@gluon.jit
def _product(codes, values, LAYOUT: gl.constexpr):
    """Product of codes [64, BN] and values [DH, BN], transposed."""
    nothing = gl.full([64, values.shape[0]], 0.0, gl.float32, LAYOUT)
    product = warpgroup_mma(codes, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[product])
