"""Differential attention of many queries in one kernel launch: both maps, λ and the pair norm.

For inference: no gradient passes. Its plain form is `diffquant.attention.naive`.
"""

from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import call_refusal, empty_output, widths_refusal
from diffquant.kernels.attention.prefill_v1 import prefill_v1
from diffquant.kernels.attention.prefill_v2 import prefill_v2
from diffquant.kernels.configs import PREFILL, choose
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.gpu import device_class, device_refusal
from diffquant.kernels.strides import same_strides

# Wider products spread their warps over columns on Ampere: see `attend_tile`. Hopper's do not.
_AMPERE_COLUMNS = 128


def prefill(call: AttentionCall) -> Tensor:
    """Attention of a call in one launch: both maps, λ and the pair norm.

    Args:
        call: two maps of float16 or bfloat16, d 64 or 128, dv = d or 2d, a positive scale, logits left alone.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: the kernels do not take the call.
    """
    if call.scale <= 0:
        raise UsageError(f"prefill takes a positive scale, got {call.scale}")
    reason = _unsupported(call)
    if reason or call.lam is None:
        raise UsageError(f"prefill: {reason}")
    norm = call.post or PairNorm(0.0)
    starts, ends = call.mask.ranges or (None, None)
    out: Tensor = _op(
        call.q[0], call.q[1], call.k[0], None if call.shares_keys else call.k[1], call.v, call.lam, starts, ends,
        norm.weight, call.scale, call.post is not None, norm.eps, norm.factor,
    )  # fmt: skip
    return out


def prefill_refusal(call: AttentionCall) -> str | None:
    """Reason why `prefill` cannot serve a call, or None."""
    return device_refusal(call.v.device) or _unsupported(call)


def _unsupported(call: AttentionCall) -> str | None:
    if call.lam is None:
        return "the kernel takes two maps; one is scaled_dot_product_attention"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


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
    normed: bool,
    eps: float,
    factor: float,
) -> Tensor:
    """Output of `prefill` for a call taken apart; k2 is None where the maps share keys (V2)."""
    batch, pairs, queries, width = q1.shape
    kv_pairs, keys, value_width = v.shape[1:]
    out = empty_output(q1, value_width)
    if out.numel() == 0:
        return out
    q1, q2 = same_strides(q1, q2)
    keys_of_maps = same_strides(k1) if k2 is None else same_strides(k1, k2)
    (v,) = same_strides(v)
    lam = lam.float().expand(batch, pairs, queries, 1)
    kernel, name = (prefill_v1, "prefill_v1") if k2 is not None else (prefill_v2, "prefill_v2")
    device_kind = device_class(v.device)
    described = device_kind == "sm_90" and describable(*keys_of_maps, v)
    tile = choose(PREFILL, f"{name}/{device_kind if described else 'sm_80'}/{width}")
    if described:
        allow_descriptors()
    part = value_width if described else min(value_width, _AMPERE_COLUMNS)
    # V1's noise map waits in the output's own memory.
    parked = () if k2 is None else (out.view(torch.float16),)
    per_tile = tile.queries if k2 is not None else tile.queries // 2
    # No model of the family has a window or sees later keys: the kernel's branches for both are compiled away.
    with torch.cuda.device_of(v):
        kernel[(-(-queries // per_tile) * pairs * batch,)](
            q1, q2, *keys_of_maps, v, lam, out, *parked, starts, ends, weight,
            q1.stride()[:3], keys_of_maps[0].stride()[:3], v.stride()[:3], lam.stride()[:3], out.stride()[:3],
            pairs, pairs // kv_pairs, queries, keys, 0, scale * log2(e), eps, factor,
            CAUSAL=True, WINDOW=False, NORM=normed, DESCRIBED=described,
            ROWS=tile.queries, STEP=tile.keys, WIDTH=width, PART=part, PARTS=value_width // part,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_op.register_fake
def _(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, *_rest: object) -> Tensor:
    return empty_output(q1, v.shape[-1])
