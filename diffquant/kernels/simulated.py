"""Simulated low-bit logits inside attention: the maps are never stored, and every logit gets the code that the
plain form gives it.

One launch finds each row's largest and smallest logit; torch makes the scales of them; a second launch computes
the logits again, rounds them and attends. Rounding keeps order, so a row's largest code is known beforehand and
softmax needs no running maximum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from collections.abc import Sequence
from math import e, log2
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.errors import UsageError
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
from diffquant.kernels.strides import same_strides
from diffquant.kernels.tiles import key_blocks, seen_by
from diffquant.numerics.logit_steps import step_of
from diffquant.scheme import Scheme

TILES = {
    "simulated/sm_90/64": AttentionTile(128, 128, 8, 2),
    "simulated/sm_90/128": AttentionTile(128, 64, 8, 2),
    "simulated/sm_80/64": AttentionTile(128, 64, 8, 2),
    "simulated/sm_80/128": AttentionTile(128, 32, 8, 2),
}
GRANULARITIES = ("tensor", "head", "pair", "row")

# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = tl.constexpr(12582912.0)
_FP16_MAX = tl.constexpr(65504.0)


class Meter(Protocol):
    """What counts the work of a logit quantizer; `diffquant.attention.LogitMeter` does."""

    calls: int

    def count(self, entries: int | Tensor, clipped: int | Tensor) -> None: ...

    def record_steps(self, steps: Tensor, largest: Tensor) -> None: ...


def simulated(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    seen: Visibility,
    scheme: Scheme,
    post: PairNorm | None = None,
    meter: Meter | None = None,
) -> Tensor:
    """(softmax(r(Q1·K1ᵀ·scale)) - λ·softmax(r(Q2·K2ᵀ·scale)))·V, where r rounds logits to the scheme's codes.

    Args:
        q: one [B, h, T, d] a map, one or two maps, float16 or bfloat16.
        k: one [B, h_kv, S, d] a map; the same tensor twice where the maps share keys (V2).
        v: [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.
        scale: what multiplies Q·Kᵀ.
        seen: which keys a query sees; what none sees enters no scale.
        scheme: 2 to 8 bits per tensor, head, pair or row.
        post: the per-pair norm; None for none.
        meter: counts what was rounded, on the device.

    Returns:
        [B, h, T, dv] in v's dtype, its memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernel cannot do what is asked.
    """
    shape = attention_shape(q, k, v, lam, seen, post)
    reason = _unsupported(q, v, scheme)
    if reason:
        raise UsageError(f"simulated logits: {reason}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*q, *k, v)):
        raise UsageError("simulated logits have no backward pass here; call it under torch.no_grad()")
    norm = post or PairNorm(0.0)
    out, largest, clipped = _op(
        q[0], q[1] if len(q) == 2 else None, k[0], k[1] if len(k) == 2 else None, v, lam, seen.starts, seen.ends,
        norm.weight, scale, seen.causal, seen.window, scheme.bits, scheme.granularity, scheme.shift,
        post is not None, norm.eps, norm.factor,
    )  # fmt: skip
    if meter is not None:
        meter.calls += 1
        meter.count(_visible(seen, shape.queries, shape.keys, v) * shape.pairs * shape.maps, clipped.sum())
        for each in largest.expand(-1, -1, shape.maps, -1).unbind(2):
            meter.record_steps(step_of(each, scheme), each)
    return out


def refused(q: Sequence[Tensor], v: Tensor, scheme: Scheme) -> str | None:
    """Why the kernel cannot serve these tensors or this scheme, or None."""
    return refused_device(v.device) or _unsupported(q, v, scheme)


def _unsupported(q: Sequence[Tensor], v: Tensor, scheme: Scheme) -> str | None:
    if not scheme.quantizes:
        return "16 bits are not quantized; use a kernel without simulation"
    if scheme.granularity not in GRANULARITIES:
        return f"one scale a {scheme.granularity} is not served; the kernel takes {', '.join(GRANULARITIES)}"
    return refused_widths(q[0], v)


@torch.library.custom_op("diffquant::simulated_logits", mutates_args=())
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
    bits: int,
    granularity: str,
    shift: bool,
    normed: bool,
    eps: float,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`simulated` without its data classes.

    Returns:
        The output; the largest magnitudes that share a scale, [B, h, maps, T] with axes that share it of size 1;
        and how many logits of each row were clipped, int32 [B, h, maps, T].
    """
    batch, heads, length, width = q1.shape
    kv_heads, keys, value_width = v.shape[1:]
    maps = 1 if q2 is None else 2
    out = empty_output(q1, value_width)
    clipped = torch.zeros(batch, heads, maps, length, dtype=torch.int32, device=v.device)
    extremes = torch.zeros(2, batch, heads, maps, length, device=v.device)
    if out.numel() == 0 or keys == 0:
        return out.zero_(), _shared(extremes[0], granularity), clipped
    q = same_strides(q1) if q2 is None else same_strides(q1, q2)
    k = same_strides(k1) if k2 is None else same_strides(k1, k2)
    (v,) = same_strides(v)
    here = device_class(v.device)
    described = here == "sm_90"
    if described:
        k = k if describable(*k) else [x.clone(memory_format=torch.contiguous_format) for x in k]
        v = v if describable(v) else v.clone(memory_format=torch.contiguous_format)
    tile = choose(TILES, f"simulated/{here}/{width}")
    lam = None if lam is None else lam.float().expand(batch, heads, length, 1)
    scheme = Scheme(bits, granularity, shift=shift)
    tiles = triton.cdiv(length, tile.queries)
    # Nothing is contracted behind the formula's back: a product rounded to float32 decides codes at their borders.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    lengths = (heads, heads // kv_heads, length, keys, window)
    with torch.cuda.device_of(v):
        if described:
            allow_descriptors()
        _extremes[(tiles, batch * heads * maps)](
            q[0], q[-1], k[0], k[-1], starts, ends, extremes[0], extremes[1],
            q[0].stride()[:3], k[0].stride()[:3], *lengths, scale,
            MAPS=maps, CAUSAL=causal, DESCRIBED=described, D=width, BM=tile.queries, BN=tile.keys, **options,
        )  # fmt: skip
        top, bottom = extremes
        largest = _shared(top - bottom if shift else torch.maximum(top.abs(), bottom.abs()), granularity)
        steps = step_of(largest, scheme).expand(batch, heads, maps, length)
        if described:
            allow_descriptors()
        _attend[(tiles, batch * heads)](
            q[0], q[-1], k[0], k[-1], v, lam, starts, ends, weight, top, steps, out,
            out.view(torch.float16), clipped,
            q[0].stride()[:3], k[0].stride()[:3], v.stride()[:3], steps.stride(),
            None if lam is None else lam.stride()[:3], out.stride()[:3], *lengths, scale, log2(e),
            2**bits - 1, eps, factor,
            MAPS=maps, CAUSAL=causal, SHIFT=shift, NORM=normed, DESCRIBED=described, D=width, DV=value_width,
            HALVES=2 if value_width > tile.queries and not described else 1, BM=tile.queries, BN=tile.keys, **options,
        )  # fmt: skip
    return out, largest, clipped


@_op.register_fake
def _(
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
    bits: int,
    granularity: str,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, _ = q1.shape
    rows = q1.new_empty(batch, heads, 1 if q2 is None else 2, length, dtype=torch.float32)
    return empty_output(q1, v.shape[-1]), _shared(rows, granularity), rows.to(torch.int32)


def _shared(rows: Tensor, granularity: str) -> Tensor:
    """Largest of the rows [B, h, maps, T] that share a scale."""
    axes = {"row": (), "head": (3,), "pair": (2, 3), "tensor": (1, 2, 3)}[granularity]
    return rows.amax(axes, keepdim=True) if axes else rows.clone()


def _visible(seen: Visibility, queries: int, keys: int, beside: Tensor) -> Tensor:
    """How many (query, key) there are that see each other, over the batch; on the device of `beside`."""
    batch = beside.shape[0]
    position = torch.arange(keys - queries, keys, device=beside.device)
    start, end = (
        torch.full((batch, 1), otherwise, device=beside.device) if given is None else given[:, None].clamp(0, keys)
        for given, otherwise in ((seen.starts, 0), (seen.ends, keys))
    )
    if not seen.causal:
        return (end - start).clamp(min=0).sum() * queries
    first = start if seen.window is None else torch.maximum(start, position - seen.window + 1)
    inside = (position >= start) & (position < end)
    return torch.where(inside, position + 1 - first, 0).sum()


@triton.jit
def _quotient(x, step, inverse):
    """x / step as IEEE division rounds it, where `inverse` is 1 / step so rounded."""
    guess = x * inverse
    return tl.fma(tl.fma(-guess, step, x), inverse, guess)


@triton.jit
def _extremes(
    q1, q2, k1, k2, starts, ends, top, bottom, q_strides, k_strides, heads, group, T, S, window, scale,
    MAPS: tl.constexpr, CAUSAL: tl.constexpr, DESCRIBED: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Largest and smallest visible logit of each row of a tile; 0 and 0 where it sees none."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair, own = tl.program_id(1) // MAPS, tl.program_id(1) % MAPS
    sequence, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    query = tile * BM + tl.arange(0, BM)
    first, last = seen_by(query, T, S - T - start, valid, window, CAUSAL)
    begin, inner, outer, stop = key_blocks(first, last, valid, BN)
    q = (q1 if own == 0 else q2) + sequence * q_strides[0] + head * q_strides[1]
    q = load_rows(q, tile * BM, 0, T, q_strides[2], BM, D, False, True)
    k = (k1 if own == 0 else k2) + sequence * k_strides[0] + head // group * k_strides[1]
    k += tl.cast(start, tl.int64) * k_strides[2]
    if DESCRIBED:
        k = tl.make_tensor_descriptor(k, [valid, D], [k_strides[2], 1], [BN, D])
    high = tl.full([BM], -float("inf"), tl.float32)
    low = tl.full([BM], float("inf"), tl.float32)
    if window is not None:
        high, low = _extremes_among(
            high, low, q, k, k_strides[2], begin, inner, first, last, valid, scale, True, DESCRIBED, D, BN
        )
    high, low = _extremes_among(
        high, low, q, k, k_strides[2], inner, outer, first, last, valid, scale, False, DESCRIBED, D, BN
    )
    high, low = _extremes_among(
        high, low, q, k, k_strides[2], outer, stop, first, last, valid, scale, True, DESCRIBED, D, BN
    )
    row = tl.program_id(1).to(tl.int64) * T + query
    tl.store(top + row, tl.where(first < last, high, 0.0), mask=query < T)
    tl.store(bottom + row, tl.where(first < last, low, 0.0), mask=query < T)


@triton.jit
def _extremes_among(
    high, low, q, k, k_stride, begin, stop, first, last, valid, scale,
    MASKED: tl.constexpr, DESCRIBED: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    for n in tl.range(begin, stop, BN):
        rows = load_rows(k, n, 0, valid, k_stride, BN, D, DESCRIBED, MASKED)
        logits = tl.dot(q, rows.T) * scale
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            seen = (key >= first[:, None]) & (key < last[:, None])
            high = tl.maximum(high, tl.max(tl.where(seen, logits, -float("inf")), 1))
            low = tl.minimum(low, tl.min(tl.where(seen, logits, float("inf")), 1))
        else:
            high = tl.maximum(high, tl.max(logits, 1))
            low = tl.minimum(low, tl.min(logits, 1))
    return high, low


@triton.jit
def _attend(
    q1, q2, k1, k2, v, lam, starts, ends, weight, top, steps, out, parked, clipped,
    q_strides, k_strides, v_strides, step_strides, lam_strides, out_strides,
    heads, group, T, S, window, scale, log2e, levels, eps, factor,
    MAPS: tl.constexpr, CAUSAL: tl.constexpr, SHIFT: tl.constexpr, NORM: tl.constexpr, DESCRIBED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, HALVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one pair, a map after the other."""
    DH: tl.constexpr = DV // HALVES
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1)
    sequence, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    query, value = tile * BM + tl.arange(0, BM), tl.arange(0, DV)
    first, last = seen_by(query, T, S - T - start, valid, window, CAUSAL)
    begin, inner, outer, stop = key_blocks(first, last, valid, BN)
    at = sequence * out_strides[0] + head * out_strides[1]
    at += query.to(tl.int64)[:, None] * out_strides[2] + value[None, :]
    stored = (query < T)[:, None]
    values = v + sequence * v_strides[0] + head // group * v_strides[1] + tl.cast(start, tl.int64) * v_strides[2]
    if DESCRIBED:
        values = tl.make_tensor_descriptor(values, [valid, DV], [v_strides[2], 1], [BN, DH])
    for own in tl.range(0, MAPS, num_stages=1):
        q = (q1 if own == 0 else q2) + sequence * q_strides[0] + head * q_strides[1]
        q = load_rows(q, tile * BM, 0, T, q_strides[2], BM, D, False, True)
        k = (k1 if own == 0 else k2) + sequence * k_strides[0] + head // group * k_strides[1]
        k += tl.cast(start, tl.int64) * k_strides[2]
        if DESCRIBED:
            k = tl.make_tensor_descriptor(k, [valid, D], [k_strides[2], 1], [BN, D])
        row = (pair * MAPS + own).to(tl.int64) * T + query
        largest = tl.load(top + row, mask=query < T, other=0.0)
        step = sequence * step_strides[0] + head * step_strides[1] + own * step_strides[2] + query * step_strides[3]
        step = tl.load(steps + step, mask=query < T, other=1.0)
        inverse = tl.div_rn(1.0, step)
        # Shifted logits are at most 0. Others reach the code of their row's largest.
        code = tl.zeros([BM], tl.float32) if SHIFT else (_quotient(largest, step, inverse) + _ROUND) - _ROUND
        left = tl.zeros([BM, DH], tl.float32)
        right = tl.zeros([BM, DH], tl.float32)
        total = tl.zeros([BM], tl.float32)
        below = tl.zeros([BM], tl.int32)
        if window is not None:
            left, right, total, below = _attend_among(
                left, right, total, below, q, k, values, k_strides[2], v_strides[2], begin, inner, first, last, valid,
                scale, largest, step, inverse, code, log2e, levels, True, SHIFT, DESCRIBED, D, DH, HALVES, BN,
            )  # fmt: skip
        left, right, total, below = _attend_among(
            left, right, total, below, q, k, values, k_strides[2], v_strides[2], inner, outer, first, last, valid,
            scale, largest, step, inverse, code, log2e, levels, False, SHIFT, DESCRIBED, D, DH, HALVES, BN,
        )  # fmt: skip
        left, right, total, below = _attend_among(
            left, right, total, below, q, k, values, k_strides[2], v_strides[2], outer, stop, first, last, valid,
            scale, largest, step, inverse, code, log2e, levels, True, SHIFT, DESCRIBED, D, DH, HALVES, BN,
        )  # fmt: skip
        if SHIFT:
            tl.store(clipped + row, below, mask=query < T)
        y = tl.join(left, right).permute(0, 2, 1).reshape([BM, DV]) if HALVES == 2 else left
        y *= tl.where(last > 0, 1 / tl.where(total == 0, 1.0, total), 0.0)[:, None]
        if own + 1 < MAPS:
            # In fp16 whatever the output's type: bfloat16 would lose what the difference keeps.
            tl.store(parked + at, tl.minimum(tl.maximum(y, -_FP16_MAX), _FP16_MAX).to(tl.float16), mask=stored)
            # A thread may read back what another one parked.
            tl.debug_barrier()
        else:
            if MAPS == 2:
                second = sequence * lam_strides[0] + head * lam_strides[1] + query.to(tl.int64) * lam_strides[2]
                second = tl.load(lam + second, mask=query < T, other=0.0)
                y = tl.load(parked + at, mask=stored, other=0.0).to(tl.float32) - second[:, None] * y
            if NORM:
                y = pair_norm(y, weight, eps, factor, DV)
            tl.store(out + at, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _attend_among(
    left, right, total, below, q, k, values, k_stride, v_stride, begin, stop, first, last, valid, scale,
    largest, step, inverse, code, log2e, levels,
    MASKED: tl.constexpr, SHIFT: tl.constexpr, DESCRIBED: tl.constexpr,
    D: tl.constexpr, DH: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    unit = (step * log2e)[:, None]
    floor = (-(levels + 0.5) * step)[:, None]
    for n in tl.range(begin, stop, BN):
        rows = load_rows(k, n, 0, valid, k_stride, BN, D, DESCRIBED, MASKED)
        logits = tl.dot(q, rows.T) * scale
        if SHIFT:
            logits -= largest[:, None]
        codes = _quotient(logits, step[:, None], inverse[:, None]) + _ROUND
        if SHIFT:
            codes = tl.maximum(codes - _ROUND, -1.0 * levels)
        else:
            codes -= (code + _ROUND)[:, None]
        p = tl.exp2(codes * unit)
        under = logits < floor
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            seen = (key >= first[:, None]) & (key < last[:, None])
            p = tl.where(seen, p, 0.0)
            under = under & seen
        if SHIFT:
            below += tl.sum(under.to(tl.int32), 1)
        total += tl.sum(p, 1)
        p = p.to(q.dtype)
        left = tl.dot(p, load_rows(values, n, 0, valid, v_stride, BN, DH, DESCRIBED, MASKED), left)
        if HALVES == 2:
            right = tl.dot(p, load_rows(values, n, DH, valid, v_stride, BN, DH, DESCRIBED, MASKED), right)
    return left, right, total, below
