"""Differential attention over many queries with int8 Q·Kᵀ, and P·V in half precision or in e4m3.

A program takes a tile of rows through all keys its rows see. V1's maps follow one another with one accumulator;
the first map's result waits in the output's own memory. V2's maps share keys, so a query's two rows are
neighbours in one tile and are subtracted at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffquant.errors import UsageError
from diffquant.kernels import configs
from diffquant.kernels.arguments import (
    PairNorm,
    Visibility,
    attention_shape,
    empty_output,
    refused_device,
    refused_widths,
)
from diffquant.kernels.configs import AttentionTile, choose, device_class
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.online import load_rows, pair_norm, valid_range
from diffquant.kernels.quantize_qkv import QuantizedKV, quantize_qkv, swizzled
from diffquant.kernels.strides import same_strides
from diffquant.kernels.tiles import key_blocks, seen_by

# 128 keys a step halve the rescaling of 64, and softmax is what 8-bit attention spends most on.
TILES = {
    "prefill_int8/sm_90/64": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_90/128": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_80/64": AttentionTile(128, 64, 8, 2),
    "prefill_int8/sm_80/128": AttentionTile(128, 64, 8, 2),
}
PV_TYPES = ("fp16", "fp8")

_HIDDEN = tl.constexpr(-1.0e30)
# log2 of e4m3's largest number: probabilities are stored times 448 and use all of its range.
_E4M3_TOP = tl.constexpr(8.807354922057604)
_FP16_MAX = tl.constexpr(65504.0)


def prefill_int8(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    seen: Visibility,
    post: PairNorm | None = None,
    pv: str = "fp16",
) -> Tensor:
    """(softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V with Q and K in 8 bits, or all three.

    Args:
        q: one [B, h, T, d] a map, one or two maps, float16 or bfloat16.
        k: one [B, h_kv, S, d] a map; the same tensor twice where the maps share keys (V2).
        v: [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.
        scale: what multiplies Q·Kᵀ.
        seen: which keys a query sees; a query that sees none gives 0.
        post: the per-pair norm; None for none.
        pv: "fp16" multiplies P and V in V's own type, "fp8" in e4m3.

    Returns:
        [B, h, T, dv] in v's dtype, its memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the device cannot do what is asked.
    """
    attention_shape(q, k, v, lam, seen, post)
    reason = _unsupported(q, v, pv)
    if reason:
        raise UsageError(f"prefill_int8: {reason}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*q, *k, v)):
        raise UsageError("prefill_int8 has no backward pass; call it under torch.no_grad()")
    norm = post or PairNorm(0.0)
    return _op(
        q[0], q[1] if len(q) == 2 else None, k[0], None if k[-1] is k[0] else k[1], v, lam, seen.starts, seen.ends,
        norm.weight, scale, seen.causal, seen.window, post is not None, norm.eps, norm.factor, pv,
    )  # fmt: skip


def refused(q: Sequence[Tensor], v: Tensor, *, pv: str = "fp16") -> str | None:
    """Why `prefill_int8` cannot serve these tensors, or None."""
    return refused_device(v.device) or _unsupported(q, v, pv)


def _unsupported(q: Sequence[Tensor], v: Tensor, pv: str) -> str | None:
    if pv not in PV_TYPES:
        return f"P·V in {pv!r} is unknown; known are {', '.join(PV_TYPES)}"
    if pv == "fp8" and configs.capability(v.device) < (8, 9):
        return "P·V in fp8 needs compute capability 8.9 (Ada, Hopper) or newer; use pv='fp16'"
    return refused_widths(q[0], v)


@torch.library.custom_op("diffquant::prefill_int8", mutates_args=())
def _op(
    q1: Tensor,
    q2: Tensor | None,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    weight: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    normed: bool,
    eps: float,
    factor: float,
    pv: str,
) -> Tensor:
    """`prefill_int8` without its data classes; k2 None where the maps share keys (V2)."""
    batch, heads, length, width = q1.shape
    kv_heads, keys, value_width = v.shape[1:]
    out = empty_output(q1, value_width)
    if out.numel() == 0:
        return out
    if keys == 0:
        return out.zero_()
    here = device_class(v.device)
    tile = choose(TILES, f"prefill_int8/{here}/{width}")
    q = same_strides(q1) if q2 is None else same_strides(q1, q2)
    k = same_strides(k1) if k2 is None else same_strides(k1, k2)
    (v,) = same_strides(v)
    packed = len(q) // len(k)
    lam = None if lam is None else lam.float().expand(batch, heads, length, 1)
    seen = Visibility(causal, window, starts, ends)
    with torch.cuda.device_of(v):
        codes = quantize_qkv(q, k, v, seen, scale, tile_rows=tile.queries, block=tile.keys, values=pv == "fp8")
        described = here == "sm_90"
        if described and not describable(v):
            v = v.clone(memory_format=torch.contiguous_format)
        operands = _described(codes, v, tile) if described else (codes.q, codes.k, v if codes.v is None else codes.v)
        if described and codes.v is None:
            allow_descriptors()
        _attend[(triton.cdiv(length * packed, tile.queries), batch * heads)](
            *operands, codes.q_scale, codes.k_scale, codes.v_scale, lam, starts, ends, weight,
            out, out.view(torch.float16), v.stride()[:3], None if lam is None else lam.stride()[:3], out.stride()[:3],
            heads, heads // kv_heads, length, keys, codes.q.shape[3], codes.k.shape[3], window, eps, factor,
            CAUSAL=causal, NORM=normed, MAPS=len(k), PACK=packed, D=width, DV=value_width, FP8=pv == "fp8",
            DESCRIBED=described, PINNED=described and not triton.knobs.runtime.interpret,
            BM=tile.queries, BN=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_op.register_fake
def _(q1: Tensor, q2: Tensor | None, k1: Tensor, k2: Tensor | None, v: Tensor, *rest: object) -> Tensor:
    return empty_output(q1, v.shape[-1])


def _described(codes: QuantizedKV, v: Tensor, tile: AttentionTile) -> tuple[TensorDescriptor | Tensor, ...]:
    """Descriptors of the codes, each tensor as one matrix; 16-bit V as it is."""
    width = codes.q.shape[-1]
    q = TensorDescriptor.from_tensor(codes.q.flatten(0, 3), [tile.queries, width])
    k = TensorDescriptor.from_tensor(codes.k.flatten(0, 3), [tile.keys, width])
    if codes.v is None:
        return q, k, v
    return q, k, TensorDescriptor.from_tensor(codes.v.flatten(0, 2), [min(v.shape[-1], 128), tile.keys])


@triton.jit
def _attend(
    q8, k8, v, q_scale, k_scale, v_scale, lam, starts, ends, weight, out, parked, v_strides, lam_strides, out_strides,
    heads, group, T, S, rows, padded, window, eps, factor,
    CAUSAL: tl.constexpr, NORM: tl.constexpr, MAPS: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, FP8: tl.constexpr, DESCRIBED: tl.constexpr, PINNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of BM rows of one pair: BM / PACK queries."""
    # Under causal order the last tiles see most: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
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
        top = tl.full([BM], _HIDDEN, tl.float32)
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
            tl.store(parked + at, tl.minimum(tl.maximum(y, -_FP16_MAX), _FP16_MAX).to(tl.float16), mask=stored)
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
    """Online softmax over the keys from `begin` up to `stop`."""
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
            logits = tl.where((key >= first[:, None]) & (key < last[:, None]), logits * scale[:, None], _HIDDEN)
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
    """e4m3 codes of V [BN, DH]."""
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
