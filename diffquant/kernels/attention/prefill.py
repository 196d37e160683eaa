"""Differential attention of many queries in one kernel launch: both maps, λ and the pair norm.

For inference: no gradient passes. Its plain form is `diffquant.attention.naive`.
"""

from math import e, log2
from typing import cast

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import call_refusal, widths_refusal
from diffquant.kernels.attention.operator import Operands, as_operator
from diffquant.kernels.attention.prefill_v1 import prefill_v1
from diffquant.kernels.attention.prefill_v2 import prefill_v2
from diffquant.kernels.configs import PREFILL, choose
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.gpu import device_class, device_refusal

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
    out: Tensor = _operator(call)
    return out


def prefill_refusal(call: AttentionCall) -> str | None:
    """Reason why `prefill` cannot serve a call, or None."""
    return device_refusal(call.v.device) or _unsupported(call)


def _unsupported(call: AttentionCall) -> str | None:
    if call.lam is None:
        return "the kernel takes two maps; one is scaled_dot_product_attention"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands) -> Tensor:
    """Output of `prefill`."""
    out, v, lam = x.out, x.v, cast(Tensor, x.lam)
    if x.is_blind:
        return out.zero_()
    batch, pairs, queries, width = x.q[0].shape
    kv_pairs, keys, value_width = v.shape[1:]
    has_own_keys = len(x.k) == 2
    kernel, name = (prefill_v1, "prefill_v1") if has_own_keys else (prefill_v2, "prefill_v2")
    device_kind = device_class(v.device)
    described = device_kind == "sm_90" and describable(*x.k, v)
    tile = choose(PREFILL, f"{name}/{device_kind if described else 'sm_80'}/{width}")
    if described:
        allow_descriptors()
    part = value_width if described else min(value_width, _AMPERE_COLUMNS)
    # V1's noise map waits in the output's own memory.
    parked = (out.view(torch.float16),) if has_own_keys else ()
    per_tile = tile.queries if has_own_keys else tile.queries // 2
    # No model of the family has a window or sees later keys: the kernel's branches for both are compiled away.
    with torch.cuda.device_of(v):
        kernel[(-(-queries // per_tile) * pairs * batch,)](
            *x.q, *x.k, v, lam, out, *parked, x.starts, x.ends, x.weight,
            x.q[0].stride()[:3], x.k[0].stride()[:3], v.stride()[:3], lam.stride()[:3], out.stride()[:3],
            pairs, pairs // kv_pairs, queries, keys, 0, x.scale * log2(e), x.eps, x.factor,
            CAUSAL=True, WINDOW=False, NORM=x.normed, DESCRIBED=described,
            ROWS=tile.queries, STEP=tile.keys, WIDTH=width, PART=part, PARTS=value_width // part,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


_operator = as_operator("prefill", _launch)
