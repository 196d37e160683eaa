"""Registers the Triton kernels as backends. Triton is imported only when a kernel is needed on a supported device."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffquant.attention.naive import naive
from diffquant.attention.registry import LATENT, Backend, register
from diffquant.family.call import AttentionCall
from diffquant.kernels.gpu import device_refusal
from diffquant.support.devices import log_once

# With fewer queries most of a fused prefill's tile would be empty.
_FEW_QUERIES = 16
_REPEATED = "the Triton kernels compute a noise map for each pair: every noise head is repeated %d times"


def _kernel(name: str) -> tuple[Callable[..., Tensor], Callable[..., str | None]]:
    """Return a kernel and the function that explains why it cannot serve a call; both take a call and options."""
    if name == "prefill":
        from diffquant.kernels.attention.prefill import prefill, prefill_refusal

        return prefill, prefill_refusal
    if name == "prefill_int8":
        from diffquant.kernels.attention.prefill_int8 import prefill_int8, prefill_int8_refusal

        return prefill_int8, prefill_int8_refusal
    if name == "prefill_simulated":
        from diffquant.kernels.attention.prefill_simulated import prefill_simulated, prefill_simulated_refusal

        return prefill_simulated, prefill_simulated_refusal
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized, prefill_specialized_refusal

    return prefill_specialized, prefill_specialized_refusal


def _backend(name: str, kernel: str, *options: object, **ranked: Any) -> Backend:
    """Make a backend from a kernel. It repeats shared noise heads, since the kernels need one for each pair."""

    def compute(call: AttentionCall) -> Tensor:
        if call.signals_per_noise > 1:
            log_once(__name__, logging.INFO, _REPEATED, call.signals_per_noise)
        return _kernel(kernel)[0](call.expand_noise(), *options)

    def refuses(call: AttentionCall) -> str | None:
        return device_refusal(call.v.device) or _kernel(kernel)[1](call.expand_noise(), *options)

    return Backend(name, compute, refuses, **ranked)


def _is_worth_fusing(call: AttentionCall) -> bool:
    # A fused kernel reads V once for both maps; a plain Transformer has only one map.
    return call.maps == 2 and call.length > _FEW_QUERIES


register(_backend("triton", "prefill", priority=30, is_worthwhile=_is_worth_fusing))
register(
    _backend("triton-simulated", "prefill_simulated", False, logits="quantized", priority=30, rounds_operands=True)
)
# Used only if chosen by name: they are faster, but their results are off by about 1 %, and by a few percent if P·V is
# in fp8 too.
register(_backend("triton-int8", "prefill_int8", "fp16"))
register(_backend("triton-fp8", "prefill_int8", "fp8"))
# Used only if chosen by name: no GPU has run them. They compute the same as the kernels without "specialized".
register(_backend("triton-simulated-specialized", "prefill_simulated", True, logits="quantized"))
register(_backend("triton-specialized", "prefill_specialized", 16))
register(_backend("triton-fp8-specialized", "prefill_specialized", 8))


def _refuse_calls(_call: AttentionCall) -> str:
    return "this backend only decodes a few tokens at a time from the cache of a model with latent attention"


# The model calls the kernel itself, since an `AttentionCall` has no cache, and uses other backends for all other calls.
register(Backend(LATENT, naive, _refuse_calls))
