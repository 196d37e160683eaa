"""The Triton kernels behind an attention's call. Triton is not imported before one of them is asked for."""

from typing import cast

import torch
from torch import Tensor

from diffquant.attention.call import Call
from diffquant.attention.logits import LogitMeter
from diffquant.kernels.arguments import Visibility, refused_device
from diffquant.scheme import Scheme


def fused(call: Call) -> Tensor:
    """Both maps, λ and the pair norm in one kernel."""
    from diffquant.kernels.attention.prefill import prefill

    lam = cast(Tensor, call.lam)  # one map is refused
    return prefill(call.q, call.k, call.v, lam, scale=call.scale, seen=_visibility(call), post=call.post)


def refused_by_fused(call: Call) -> str | None:
    """Why `fused` cannot serve a call, or None."""
    if refusal := _refused_by_all(call):
        return refusal
    from diffquant.kernels.attention.prefill import refused

    return refused(call.q, call.k, call.v, call.lam)


def fused_int8(call: Call) -> Tensor:
    """As `fused` with Q and K in 8 bits: faster, and about 1 % away."""
    return _prefill_int8(call, "fp16")


def fused_fp8(call: Call) -> Tensor:
    """As `fused_int8` with probabilities and values in fp8 (e4m3): faster still, and some percent away."""
    return _prefill_int8(call, "fp8")


def refused_by_int8(call: Call) -> str | None:
    """Why `fused_int8` cannot serve a call, or None."""
    return _refused_by_prefill_int8(call, "fp16")


def refused_by_fp8(call: Call) -> str | None:
    """Why `fused_fp8` cannot serve a call, or None."""
    return _refused_by_prefill_int8(call, "fp8")


def fused_simulated(call: Call, logits: Scheme, meter: LogitMeter | None = None) -> Tensor:
    """`simulated` in two passes of a kernel, no map in memory."""
    from diffquant.kernels.attention.simulated import simulated

    return simulated(
        call.q,
        call.k,
        call.v,
        call.lam,
        scale=call.scale,
        seen=_visibility(call),
        scheme=logits,
        post=call.post,
        meter=meter,
    )


def refused_by_simulated(call: Call, logits: Scheme) -> str | None:
    """Why `fused_simulated` cannot serve a call, or None."""
    if refusal := _refused_by_all(call):
        return refusal
    from diffquant.kernels.attention.simulated import refused

    return refused(call.q, call.v, logits)


def _prefill_int8(call: Call, pv: str) -> Tensor:
    from diffquant.kernels.attention.prefill_int8 import prefill_int8

    return prefill_int8(
        call.q, call.k, call.v, call.lam, scale=call.scale, seen=_visibility(call), post=call.post, pv=pv
    )


def _refused_by_prefill_int8(call: Call, pv: str) -> str | None:
    if refusal := _refused_by_all(call):
        return refusal
    from diffquant.kernels.attention.prefill_int8 import refused

    return refused(call.q, call.v, pv=pv)


def _refused_by_all(call: Call) -> str | None:
    if refusal := refused_device(call.v.device):
        return refusal
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*call.q, *call.k, call.v)):
        return "the kernels have no backward pass"
    if call.mask.keys is not None and call.mask.ranges is None:
        return "the padding mask has holes; the kernels take one range of keys a sequence"
    return None


def _visibility(call: Call) -> Visibility:
    starts, ends = call.mask.ranges or (None, None)
    return Visibility(call.mask.causal, call.mask.window, starts, ends)
