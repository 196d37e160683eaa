"""The Triton kernels as backends. Triton is imported only when a device that can run it needs a kernel."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from diffquant.attention.naive import naive
from diffquant.attention.registry import LATENT, Backend, register
from diffquant.family.call import AttentionCall
from diffquant.kernels.gpu import device_refusal
from diffquant.support.logs import log_once

# Below this many queries a fused prefill leaves most of its tile empty.
_FEW_QUERIES = 16
_REPEATED = "the Triton kernels compute a noise map for each pair: every noise head is repeated %d times"


def _kernel(name: str) -> tuple[Callable[..., Tensor], Callable[..., str | None]]:
    """A kernel and its refusal check; both take a call and the kernel's options."""
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
    """Wrap a kernel as a backend that runs where Triton does and expands shared noise heads, which kernels require."""

    def compute(call: AttentionCall) -> Tensor:
        if call.signals_per_noise > 1:
            log_once(__name__, logging.INFO, _REPEATED, call.signals_per_noise)
        return _kernel(kernel)[0](call.expanded(), *options)

    def refuses(call: AttentionCall) -> str | None:
        return device_refusal(call.v.device) or _kernel(kernel)[1](call.expanded(), *options)

    return Backend(name, compute, refuses, **ranked)


def _is_worth_fusing(call: AttentionCall) -> bool:
    # A fused kernel reads V once for both maps. A plain Transformer has nothing to fuse.
    return call.maps == 2 and call.length > _FEW_QUERIES


register(_backend("triton", "prefill", priority=30, pays=_is_worth_fusing))
register(
    _backend("triton-simulated", "prefill_simulated", False, logits="quantized", priority=30, rounds_operands=True)
)
# Used only by name: they are faster, but about 1 % off the model's result, and some percent with P·V in
# fp8 too.
register(_backend("triton-int8", "prefill_int8", "fp16"))
register(_backend("triton-fp8", "prefill_int8", "fp8"))
# Used only by name: some of their launches never ended on an H100, and no GPU has run what mended that. They compute
# the same as the kernels without "specialized" or "pipelined".
register(_backend("triton-simulated-specialized", "prefill_simulated", True, logits="quantized"))
register(_backend("triton-specialized", "prefill_specialized", 16))
register(_backend("triton-fp8-specialized", "prefill_specialized", 8))
register(_backend("triton-pipelined", "prefill_specialized", 16, True))


def _decodes_alone(_call: AttentionCall) -> str:
    return "it reads the cache of a model with latent attention, a few tokens at a time, and computes nothing else"


# The model calls its kernel, since no call has a cache, and gives other backends what it does not read.
register(Backend(LATENT, naive, _decodes_alone))
