"""Differential attention of many queries in one kernel launch: both maps, λ and the per-pair norm.

For inference: no gradient passes. Its plain form is `diffquant.attention.naive`.
"""

from collections.abc import Sequence
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import Visibility, attention_shape, empty_output, refused_device, refused_widths
from diffquant.kernels.attention.prefill_v1 import prefill_v1
from diffquant.kernels.attention.prefill_v2 import prefill_v2
from diffquant.kernels.configs import PREFILL, choose, device_class
from diffquant.kernels.descriptors import allow_descriptors, describable

# Wider products spread their warps over columns on Ampere: see `attend_tile`. Hopper's do not.
_AMPERE_COLUMNS = 128


def prefill(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    seen: Visibility,
    post: PairNorm | None = None,
) -> Tensor:
    """(softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V, optionally normed.

    Args:
        q: two [B, h, T, d], any strides.
        k: two [B, h_kv, S, d]; the same tensor twice in V2. h_kv divides h.
        v: [B, h_kv, S, dv], dv = d or 2d.
        lam: λ, broadcastable to [B, h, T, 1]; None, one map, is refused.
        scale: what multiplies Q·Kᵀ; positive.
        seen: which keys a query sees.
        post: the norm over a pair's output.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or are none that the kernels take.
    """
    attention_shape(q, k, v, lam, seen, post)
    if scale <= 0:
        raise UsageError(f"prefill takes a positive scale, got {scale}")
    reason = _unsupported(q, k, v, lam)
    if reason:
        raise UsageError(f"prefill: {reason}")
    norm = post or PairNorm(0.0)
    return _op(
        q[0], q[1], k[0], None if k[1] is k[0] else k[1], v, lam, seen.starts, seen.ends, norm.weight,
        scale, seen.causal, seen.window, post is not None, norm.eps, norm.factor,
    )  # fmt: skip


def refused(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None) -> str | None:
    """Why `prefill` cannot serve these tensors, or None."""
    return refused_device(v.device) or _unsupported(q, k, v, lam)


def _unsupported(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None) -> str | None:
    if lam is None:
        return "the kernel takes two maps; one is scaled_dot_product_attention"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*q, *k, v, lam)):
        return "the kernel has no backward pass; call it under torch.no_grad()"
    return refused_widths(q[0], v)


@torch.library.custom_op("diffquant::prefill", mutates_args=())
def _op(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    weight: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    normed: bool,
    eps: float,
    factor: float,
) -> Tensor:
    """`prefill` without its data classes; k2 None where the maps share keys (V2)."""
    batch, pairs, queries, width = q1.shape
    kv_pairs, keys, value_width = v.shape[1:]
    out = empty_output(q1, value_width)
    if out.numel() == 0:
        return out
    q1, q2 = _alike(q1, q2)
    k1, k2 = (_dense(k1), None) if k2 is None else _alike(k1, k2)
    v = _dense(v)
    lam = lam.float().expand(batch, pairs, queries, 1)
    kernel, name = (prefill_v1, "prefill_v1") if k2 is not None else (prefill_v2, "prefill_v2")
    here = device_class(v.device)
    described = here == "sm_90" and describable(k1, v) and (k2 is None or describable(k2))
    tile = choose(PREFILL, f"{name}/{here if described else 'sm_80'}/{width}")
    if described:
        allow_descriptors()
    part = value_width if described else min(value_width, _AMPERE_COLUMNS)
    per_tile = tile.queries if k2 is not None else tile.queries // 2
    with torch.cuda.device_of(v):
        kernel[(-(-queries // per_tile) * pairs * batch,)](
            q1, q2, *((k1,) if k2 is None else (k1, k2)), v, lam, out, starts, ends, weight,
            q1.stride()[:3], k1.stride()[:3], v.stride()[:3], lam.stride()[:3], out.stride()[:3],
            pairs, pairs // kv_pairs, queries, keys, window or 0, scale * log2(e), eps, factor,
            CAUSAL=causal, WINDOW=window is not None, NORM=normed, DESCRIBED=described,
            ROWS=tile.queries, STEP=tile.keys, WIDTH=width, PART=part, PARTS=value_width // part,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@_op.register_fake
def _(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, *rest: object) -> Tensor:
    return empty_output(q1, v.shape[-1])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors whose rows are dense and whose strides are the same."""
    if a.stride() == b.stride() and a.stride(-1) == 1:
        return a, b
    return a.contiguous(), b.contiguous()
