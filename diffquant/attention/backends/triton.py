"""Registers the Triton kernels as backends. Triton is imported only when a kernel is needed on a supported device."""

import logging
from pkgutil import resolve_name
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


def _kernel(name: str) -> Any:
    """Return a kernel, or with "_refusal" behind its name the function that explains why it cannot serve a call."""
    return resolve_name(f"diffquant.kernels.attention.{name.removesuffix('_refusal')}:{name}")


def _backend(name: str, kernel: str, *options: object, **ranked: Any) -> Backend:
    """Make a backend from a kernel. It repeats shared noise heads, since the kernels need one for each pair."""

    def compute(call: AttentionCall) -> Tensor:
        if call.signals_per_noise > 1:
            log_once(__name__, logging.INFO, _REPEATED, call.signals_per_noise)
        output: Tensor = _kernel(kernel)(call.expand_noise(), *options)
        return output

    def refuses(call: AttentionCall) -> str | None:
        return device_refusal(call.v.device) or _kernel(f"{kernel}_refusal")(call.expand_noise(), *options)

    return Backend(name, compute, refuses, **ranked)


def _is_worth_fusing(call: AttentionCall) -> bool:
    # A fused kernel reads V once for both maps; a plain Transformer has only one map.
    return call.maps == 2 and call.query_count > _FEW_QUERIES


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


# The model calls the kernel itself, since an `AttentionCall` has no cache, and uses other backends for all other calls.
_ONLY_DECODES = "this backend only decodes a few tokens at a time from the cache of a model with latent attention"
register(Backend(LATENT, naive, lambda _call: _ONLY_DECODES))
