"""The Triton kernels as backends. Triton is not imported before a device that runs it asks for one of them."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import refused_device

# Below this many queries a fused prefill leaves most of its tile empty.
_FEW_QUERIES = 16


def _on_a_device(refuses: Callable[[AttentionCall], str | None]) -> Callable[[AttentionCall], str | None]:
    """Ask about the device first, where Triton may not even be installed."""
    return lambda call: refused_device(call.v.device) or refuses(call)


def _prefill(call: AttentionCall) -> Tensor:
    from diffquant.kernels.attention.prefill import prefill

    return prefill(call)


def _prefill_refuses(call: AttentionCall) -> str | None:
    from diffquant.kernels.attention.prefill import refused

    return refused(call)


def _prefill_int8(call: AttentionCall, pv: str) -> Tensor:
    from diffquant.kernels.attention.prefill_int8 import prefill_int8

    return prefill_int8(call, pv)


def _prefill_int8_refuses(call: AttentionCall, pv: str) -> str | None:
    from diffquant.kernels.attention.prefill_int8 import refused

    return refused(call, pv)


def _simulated(call: AttentionCall) -> Tensor:
    from diffquant.kernels.attention.simulated import simulated

    return simulated(call)


def _simulated_refuses(call: AttentionCall) -> str | None:
    from diffquant.kernels.attention.simulated import refused

    return refused(call)


def _is_worth_fusing(call: AttentionCall) -> bool:
    # Two maps in one kernel read V once. A plain Transformer has nothing to fuse.
    return call.maps == 2 and call.length > _FEW_QUERIES


register(Backend("triton", _prefill, _on_a_device(_prefill_refuses), priority=30, pays=_is_worth_fusing))
register(Backend("triton-simulated", _simulated, _on_a_device(_simulated_refuses), logits="quantized", priority=30))
# Faster, and not what the model computes: about 1 % away, and some percent with P·V in fp8 too.
for _name, _pv in (("triton-int8", "fp16"), ("triton-fp8", "fp8")):
    register(Backend(_name, partial(_prefill_int8, pv=_pv), _on_a_device(partial(_prefill_int8_refuses, pv=_pv))))
