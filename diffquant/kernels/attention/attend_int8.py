"""Attention over 8-bit codes of Q and K, and of V where that is asked for.

A program takes a tile of rows through all keys its rows see. V1's maps follow one another with one accumulator;
the first map's result waits in the output's own memory. V2's maps share keys, so a query's two rows are
neighbours in one tile and are subtracted at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from diffquant.kernels.attention.online import LOWEST, load_rows, pair_norm, to_float16, valid_range
from diffquant.kernels.attention.quantize_qkv import swizzled
from diffquant.kernels.attention.tiles import key_blocks, seen_by

# log2 of e4m3's largest number: probabilities are stored times 448 and use all of its range.
_E4M3_TOP = tl.constexpr(8.807354922057604)


# Lengths change from call to call: a kernel for each that is or is not a multiple of 16 would gain nothing.
@triton.jit(do_not_specialize=["T", "S", "window"])
def attend_int8(
    q8, k8, v, q_scale, k_scale, v_scale, lam, starts, ends, weight, out, parked, v_strides, lam_strides, out_strides,
    heads, group, T, S, rows, padded, window, eps, factor,
    CAUSAL: tl.constexpr, NORM: tl.constexpr, MAPS: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FP8: tl.constexpr, DESCRIBED: tl.constexpr, PINNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of BM rows of one pair: BM / PACK queries."""
    # Under causal order the last tiles see most: they start first.
    tiles = rows // BM
    tile = tiles - 1 - tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    sequence, head = (pair // heads).to(tl.int64), pair % heads
    kv = pair // heads * (heads // group) + head // group
    start, valid = valid_range(starts, ends, sequence, S)
    first, last = seen_by((tile * BM + tl.arange(0, BM)) // PACK, T, S - T - start, valid, window, CAUSAL)
    begin, inner, outer, stop = key_blocks(first, last, valid, BN)
    # A wide V in two halves. e4m3 products are added to the accumulator outside the tensor cores, whose own
    # additions keep about 14 bits, and only one half's products at a time fit in registers. On Ampere products
    # wider than a tile has rows would spread warps over columns.
    HALVES: tl.constexpr = 2 if DV == 256 and (FP8 or not DESCRIBED) else 1
    DH: tl.constexpr = DV // HALVES
    query, value = tile * (BM // PACK) + tl.arange(0, BM // PACK), tl.arange(0, DV)
    at = sequence * out_strides[0] + head.to(tl.int64) * out_strides[1]
    at += query.to(tl.int64)[:, None] * out_strides[2] + value[None, :]
    stored = (query < T)[:, None]
    lam_at = query
    if lam is not None:
        lam_at = sequence * lam_strides[0] + head.to(tl.int64) * lam_strides[1] + query.to(tl.int64) * lam_strides[2]
    if FP8:
        v_at = kv.to(tl.int64) * DV * padded
    else:
        v_at = tl.cast(start, tl.int64) * v_strides[2]
        v += sequence * v_strides[0] + (head // group).to(tl.int64) * v_strides[1] + v_at
        if DESCRIBED:
            v = tl.make_tensor_descriptor(v, [valid, DV], [v_strides[2], 1], [BN, DH])

    for own in tl.range(0, MAPS, num_stages=1):
        q_row = (pair * MAPS + own).to(tl.int64) * rows + tile * BM
        k_row = (kv * MAPS + own).to(tl.int64) * padded
        row = tl.arange(0, BM)
        if DESCRIBED:
            q = q8.load([q_row.to(tl.int32), 0])
        else:
            q = tl.load(q8 + (q_row + row)[:, None] * D + tl.arange(0, D)[None, :])
        row_scale = tl.load(q_scale + q_row + row, mask=last > 0, other=0.0)
        scales = k_scale + (kv * MAPS + own) * (padded // BN)
        top = tl.full([BM], LOWEST, tl.float32)
        total = tl.zeros([BM], tl.float32)
        low = tl.zeros([BM, DH], tl.float32)
        high = tl.zeros([BM, DH], tl.float32)
        if window is not None:
            low, high, top, total = _through(
                q, row_scale, k8, k_row, scales, v, v_at, kv * DV, v_strides[2], low, high, top, total, begin, inner,
                first, last, valid, padded, True, D, DV, DH, HALVES, FP8, DESCRIBED, PINNED, BM, BN,
            )  # fmt: skip
        low, high, top, total = _through(
            q, row_scale, k8, k_row, scales, v, v_at, kv * DV, v_strides[2], low, high, top, total, inner, outer,
            first, last, valid, padded, False, D, DV, DH, HALVES, FP8, DESCRIBED, PINNED, BM, BN,
        )  # fmt: skip
        low, high, top, total = _through(
            q, row_scale, k8, k_row, scales, v, v_at, kv * DV, v_strides[2], low, high, top, total, outer, stop,
            first, last, valid, padded, True, D, DV, DH, HALVES, FP8, DESCRIBED, PINNED, BM, BN,
        )  # fmt: skip
        part = tl.where(last > 0, 1 / tl.where(total == 0, 1.0, total), 0.0)
        y = tl.join(low, high).permute(0, 2, 1).reshape([BM, DV]) if HALVES == 2 else low
        if PACK == 2:
            # Rows alternate between the maps: the second's are taken off the first's.
            second = tl.load(lam + lam_at, mask=query < T, other=0.0)
            weights = tl.where(tl.arange(0, 2)[None, :] == 0, 1.0, -second[:, None]) * part.reshape([BM // 2, 2])
            y = tl.sum(y.reshape([BM // 2, 2, DV]) * weights[:, :, None], 1)
        else:
            y *= part[:, None]
        if own + 1 < MAPS:
            # In fp16 whatever the output's type; in units of e4m3 codes nothing overflows.
            tl.store(parked + at, to_float16(y), mask=stored)
            # A thread may read back what another one parked.
            tl.debug_barrier()
        else:
            if MAPS == 2:
                second = tl.load(lam + lam_at, mask=query < T, other=0.0)
                y = tl.load(parked + at, mask=stored, other=0.0).to(tl.float32) - second[:, None] * y
            if FP8:
                y *= tl.load(v_scale + kv * DV + value)[None, :]
            if NORM:
                y = pair_norm(y, weight, eps, factor, DV)
            tl.store(out + at, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _through(
    q, row_scale, k8, k_row, scales, v, v_at, v_row, v_stride, low, high, top, total, begin, stop,
    first, last, valid, padded, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DH: tl.constexpr,
    HALVES: tl.constexpr, FP8: tl.constexpr, DESCRIBED: tl.constexpr, PINNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """State of an online softmax after the keys from `begin` up to `stop` more."""
    TOP: tl.constexpr = _E4M3_TOP if FP8 else 0.0
    for n in tl.range(begin, stop, BN):
        if DESCRIBED:
            k = k8.load([(k_row + n).to(tl.int32), 0])
        else:
            k = tl.load(k8 + (k_row + n + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None, :])
        # Volatile, or the scalar would be copied to shared memory ahead, at two barriers a step.
        scale = row_scale * tl.load(scales + n // BN, volatile=True)
        logits = tl.dot(q, k.T).to(tl.float32)
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            logits = tl.where((key >= first[:, None]) & (key < last[:, None]), logits * scale[:, None], -float("inf"))
            risen = tl.maximum(top, tl.max(logits, 1))
            p = tl.exp2(logits - (risen - TOP)[:, None])
        else:
            risen = tl.maximum(top, tl.max(logits, 1) * scale)
            p = tl.exp2(logits * scale[:, None] - (risen - TOP)[:, None])
        shrunk = tl.exp2(top - risen)
        total = total * shrunk + tl.sum(p, 1)
        top = risen
        if FP8:
            codes = swizzled(p.to(tl.float8e4nv), BM, BN)
            low = low * shrunk[:, None] + tl.dot(codes, _values(v, v_at, v_row, n, padded, DESCRIBED, DH, BN))
            if HALVES == 2:
                if PINNED:
                    low = _pinned(low)
                upper = _values(v, v_at + DH * padded, v_row + DH, n, padded, DESCRIBED, DH, BN)
                high = high * shrunk[:, None] + tl.dot(codes, upper)
        else:
            values = load_rows(v, n, 0, valid, v_stride, BN, DH, DESCRIBED, MASKED)
            weights = p.to(values.dtype)
            low = tl.dot(weights, values, low * shrunk[:, None])
            if HALVES == 2:
                values = load_rows(v, n, DH, valid, v_stride, BN, DH, DESCRIBED, MASKED)
                high = tl.dot(weights, values, high * shrunk[:, None])
    return low, high, top, total


@triton.jit
def _values(v8, at, row, n, padded, DESCRIBED: tl.constexpr, DH: tl.constexpr, BN: tl.constexpr):
    """Codes of V in e4m3, [BN, DH]."""
    if DESCRIBED:
        values = v8.load([row, n]).T
    else:
        channel, key = tl.arange(0, DH), n + tl.arange(0, BN)
        values = tl.load(v8 + at + channel[None, :] * padded + key[:, None])
    return values


@triton.jit
def _pinned(x):
    """x, computed here and not later: else the second half's products wait beside the first's, and spill."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
