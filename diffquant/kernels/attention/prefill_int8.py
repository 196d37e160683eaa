"""Prefill attention with Q·Kᵀ in int8, and P·V in half precision or in e4m3.

A program computes a tile of rows over all keys that they see. V1's maps are computed one after the other with one
accumulator; the first map's result is stored in the output's memory. V2's maps share keys, so a query's two rows are
adjacent in one tile and are subtracted at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import Operands, call_refusal, register_operator, widths_refusal
from diffquant.kernels.attention.online import (
    LOWEST,
    allow_descriptors,
    count_visible_keys,
    load_rows,
    masked_key_bounds,
    pair_norm,
    supports_tma,
    to_float16,
    valid_range,
)
from diffquant.kernels.attention.quantize_qkv import quantize_qkv, swizzle
from diffquant.kernels.configs import choose_config, make_attention_config
from diffquant.kernels.gpu import device_class, fp8_pv_refusal

# log2(448): softmax weights are multiplied by 448, e4m3's largest number, to use its whole range.
_E4M3_TOP = tl.constexpr(8.807354922057604)


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["T", "S"])
def attend_int8(
    q8, k8, v, q_scale, k_scale, v_scale, lam, starts, ends, weight, out, noise_rows,
    v_strides, lam_strides, out_strides, heads, group, T, S, rows, padded, eps, factor,
    NORM: tl.constexpr, MAPS: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FP8: tl.constexpr, USE_TMA: tl.constexpr, PINNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of BM rows of one pair, with codes and scales from `quantize_qkv`.

    MAPS is the number of maps with separate keys (V1: 2, else 1), PACK the number of maps that share keys (V2: 2, else
    1). With PACK = 2, a query has two adjacent rows. If FP8, v has codes in e4m3, else half-precision values.
    """
    # Under causal order, tiles at the end see the most keys, so they start first.
    tiles = rows // BM
    tile = tiles - 1 - tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    sequence, head = (pair // heads).to(tl.int64), pair % heads
    kv = pair // heads * (heads // group) + head // group
    start, valid = valid_range(starts, ends, sequence, S)
    visible = count_visible_keys((tile * BM + tl.arange(0, BM)) // PACK, T, S - T - start, valid)
    outer, stop = masked_key_bounds(visible, valid, BN)
    # A wide V is processed in two halves. e4m3 products are added to the accumulator outside the tensor cores, whose
    # additions keep only about 14 bits, and only one half's products fit in registers at a time. On Ampere, products
    # wider than the number of rows would distribute warps over columns.
    HALVES: tl.constexpr = 2 if DV == 256 and (FP8 or not USE_TMA) else 1
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
        if USE_TMA:
            v = tl.make_tensor_descriptor(v, [valid, DV], [v_strides[2], 1], [BN, DH])

    for own in tl.range(0, MAPS, num_stages=1):
        q_row = (pair * MAPS + own).to(tl.int64) * rows + tile * BM
        k_row = (kv * MAPS + own).to(tl.int64) * padded
        row = tl.arange(0, BM)
        if USE_TMA:
            q = q8.load([q_row.to(tl.int32), 0])
        else:
            q = tl.load(q8 + (q_row + row)[:, None] * D + tl.arange(0, D)[None, :])
        row_scale = tl.load(q_scale + q_row + row, mask=visible > 0, other=0.0)
        scales = k_scale + (kv * MAPS + own) * (padded // BN)
        top = tl.full([BM], LOWEST, tl.float32)
        total = tl.zeros([BM], tl.float32)
        low = tl.zeros([BM, DH], tl.float32)
        high = tl.zeros([BM, DH], tl.float32)
        low, high, top, total = _attend_keys(
            q, row_scale, k8, k_row, scales, v, v_at, kv * DV, v_strides[2], low, high, top, total, 0, outer,
            visible, valid, padded, False, D, DV, DH, HALVES, FP8, USE_TMA, PINNED, BM, BN,
        )  # fmt: skip
        low, high, top, total = _attend_keys(
            q, row_scale, k8, k_row, scales, v, v_at, kv * DV, v_strides[2], low, high, top, total, outer, stop,
            visible, valid, padded, True, D, DV, DH, HALVES, FP8, USE_TMA, PINNED, BM, BN,
        )  # fmt: skip
        part = tl.where(visible > 0, 1 / tl.where(total == 0, 1.0, total), 0.0)
        y = tl.join(low, high).permute(0, 2, 1).reshape([BM, DV]) if HALVES == 2 else low
        if PACK == 2:
            # Rows alternate between the maps; the second map's rows are subtracted from the first map's.
            second = tl.load(lam + lam_at, mask=query < T, other=0.0)
            weights = tl.where(tl.arange(0, 2)[None, :] == 0, 1.0, -second[:, None]) * part.reshape([BM // 2, 2])
            y = tl.sum(y.reshape([BM // 2, 2, DV]) * weights[:, :, None], 1)
        else:
            y *= part[:, None]
        if own + 1 < MAPS:
            # In fp16 whatever the output's dtype; in units of e4m3 codes nothing overflows.
            tl.store(noise_rows + at, to_float16(y), mask=stored)
            # A thread may read what another one stored.
            tl.debug_barrier()
        else:
            if MAPS == 2:
                second = tl.load(lam + lam_at, mask=query < T, other=0.0)
                y = tl.load(noise_rows + at, mask=stored, other=0.0).to(tl.float32) - second[:, None] * y
            if FP8:
                y *= tl.load(v_scale + kv * DV + value)[None, :]
            if NORM:
                y = pair_norm(y, weight, eps, factor, DV)
            tl.store(out + at, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _attend_keys(
    q, row_scale, k8, k_row, scales, v, v_at, v_row, v_stride, low, high, top, total, begin, stop,
    visible, valid, padded, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DH: tl.constexpr,
    HALVES: tl.constexpr, FP8: tl.constexpr, USE_TMA: tl.constexpr, PINNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over the keys in [begin, stop); return the updated accumulators, maxima and sums."""
    TOP: tl.constexpr = _E4M3_TOP if FP8 else 0.0
    for n in tl.range(begin, stop, BN):
        if USE_TMA:
            k = k8.load([(k_row + n).to(tl.int32), 0])
        else:
            k = tl.load(k8 + (k_row + n + tl.arange(0, BN))[:, None] * D + tl.arange(0, D)[None, :])
        # Volatile, since Triton would otherwise prefetch the scalar to shared memory, with two barriers per step.
        scale = row_scale * tl.load(scales + n // BN, volatile=True)
        logits = tl.dot(q, k.T).to(tl.float32)
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            logits = tl.where(key < visible[:, None], logits * scale[:, None], -float("inf"))
            risen = tl.maximum(top, tl.max(logits, 1))
            p = tl.exp2(logits - (risen - TOP)[:, None])
        else:
            risen = tl.maximum(top, tl.max(logits, 1) * scale)
            p = tl.exp2(logits * scale[:, None] - (risen - TOP)[:, None])
        shrunk = tl.exp2(top - risen)
        total = total * shrunk + tl.sum(p, 1)
        top = risen
        if FP8:
            codes = swizzle(p.to(tl.float8e4nv), BM, BN)
            low = low * shrunk[:, None] + tl.dot(codes, _values(v, v_at, v_row, n, padded, USE_TMA, DH, BN))
            if HALVES == 2:
                if PINNED:
                    low = _pin(low)
                upper = _values(v, v_at + DH * padded, v_row + DH, n, padded, USE_TMA, DH, BN)
                high = high * shrunk[:, None] + tl.dot(codes, upper)
        else:
            values = load_rows(v, n, 0, valid, v_stride, BN, DH, USE_TMA, MASKED)
            weights = p.to(values.dtype)
            low = tl.dot(weights, values, low * shrunk[:, None])
            if HALVES == 2:
                values = load_rows(v, n, DH, valid, v_stride, BN, DH, USE_TMA, MASKED)
                high = tl.dot(weights, values, high * shrunk[:, None])
    return low, high, top, total


@triton.jit
def _values(v8, at, row, n, padded, USE_TMA: tl.constexpr, DH: tl.constexpr, BN: tl.constexpr):
    """Load codes of V in e4m3, [BN, DH]."""
    if USE_TMA:
        values = v8.load([row, n]).T
    else:
        channel, key = tl.arange(0, DH), n + tl.arange(0, BN)
        values = tl.load(v8 + at + channel[None, :] * padded + key[:, None])
    return values


@triton.jit
def _pin(x):
    """Return x, forcing its computation here; otherwise both halves' products would be in registers and spill."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)


# Softmax dominates the time of 8-bit attention, and 128 keys per step rescale half as often as 64.
TILES = {
    "prefill_int8/sm_90/64": make_attention_config(128, 128, 8, 2),
    "prefill_int8/sm_90/128": make_attention_config(128, 128, 8, 2),
    "prefill_int8/sm_80/64": make_attention_config(128, 64, 8, 2),
    "prefill_int8/sm_80/128": make_attention_config(128, 64, 8, 2),
}
PV_TYPES = ("fp16", "fp8")


def prefill_int8(call: AttentionCall, pv: str = "fp16") -> Tensor:
    """Compute attention of a call with Q and K quantized to int8, and optionally P and V to e4m3.

    Args:
        call: call with one or two maps, float16 or bfloat16, d = 64 or 128, dv = d or 2d, no quantized logits.
        pv: precision of P·V: "fp16" for V's dtype, "fp8" for e4m3.

    Returns:
        [B, h, T, dv] in v's dtype, in memory [B, T, h, dv].

    Raises:
        UsageError: the kernel does not support the call, or the device does not support `pv`.
    """
    if reason := prefill_int8_refusal(call, pv):
        raise UsageError(f"prefill_int8: {reason}")
    out: Tensor = _operator(call, pv)
    return out


def prefill_int8_refusal(call: AttentionCall, pv: str = "fp16") -> str | None:
    """Return why `prefill_int8` cannot serve a call on a device that runs Triton, or None."""
    if pv not in PV_TYPES:
        return f"P·V in {pv!r} is unknown; choose from {', '.join(PV_TYPES)}"
    if pv == "fp8" and (reason := fp8_pv_refusal(call.v.device)):
        return reason
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands, pv: str) -> Tensor:
    """Compute the output of `prefill_int8`."""
    out, q, k, v, lam = x.out, x.q, x.k, x.v, x.lam
    if x.is_empty:
        return out.zero_()
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    device_kind = device_class(v.device)
    tile = choose_config(TILES, f"prefill_int8/{device_kind}/{width}")
    with torch.cuda.device_of(v):
        q8, q_scale, k8, k_scale, v8, v_scale = quantize_qkv(
            q, k, v, x.starts, x.ends, x.scale, tile_rows=tile["queries"], block=tile["keys"], values=pv == "fp8"
        )
        described = device_kind == "sm_90"
        if described and not supports_tma(v):
            v = v.clone(memory_format=torch.contiguous_format)
        operands: list[Tensor | TensorDescriptor] = [q8, k8, v if v8 is None else v8]
        if described:
            operands[0] = TensorDescriptor.from_tensor(q8.flatten(0, 3), [tile["queries"], width])
            operands[1] = TensorDescriptor.from_tensor(k8.flatten(0, 3), [tile["keys"], width])
        if described and v8 is not None:
            operands[2] = TensorDescriptor.from_tensor(v8.flatten(0, 2), [min(value_width, 128), tile["keys"]])
        elif described:
            allow_descriptors()
        attend_int8[(q8.shape[3] // tile["queries"] * batch * heads,)](
            *operands, q_scale, k_scale, v_scale, lam, x.starts, x.ends, x.weight,
            out, out.view(torch.float16), v.stride()[:3], None if lam is None else lam.stride()[:3], out.stride()[:3],
            heads, heads // kv_heads, length, keys, q8.shape[3], k8.shape[3], x.eps, x.factor,
            NORM=x.normed, MAPS=len(k), PACK=len(q) // len(k), D=width, DV=value_width, FP8=pv == "fp8",
            USE_TMA=described, PINNED=described and not triton.knobs.runtime.interpret,
            BM=tile["queries"], BN=tile["keys"],
            num_warps=tile["warps"], num_stages=tile["stages"], enable_fp_fusion=True,
        )  # fmt: skip
    return out


_operator = register_operator("prefill_int8", _launch, ", str pv")
