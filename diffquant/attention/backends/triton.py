"""The Triton kernels as backends. Triton is not imported before a device that runs it asks for one of them."""

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.kernels.gpu import device_refusal
from diffquant.support.logs import log_once

# Below this many queries a fused prefill leaves most of its tile empty.
_FEW_QUERIES = 16
_REPEATED = "the Triton kernels compute a noise map for each pair: every noise head is repeated %d times"


def _on_a_device(refuses: Callable[[AttentionCall], str | None]) -> Callable[[AttentionCall], str | None]:
    """`refuses`, asked after the device, since Triton may not even be installed."""
    return lambda call: device_refusal(call.v.device) or refuses(call.expanded())


def _with_own_noise(compute: Callable[[AttentionCall], Tensor]) -> Callable[[AttentionCall], Tensor]:
    """`compute` on calls where each pair has a noise head of its own, as the kernels want them."""

    def computed(call: AttentionCall) -> Tensor:
        if call.signals_per_noise > 1:
            log_once(__name__, logging.INFO, _REPEATED, call.signals_per_noise)
        return compute(call.expanded())

    return computed


def _prefill(call: AttentionCall) -> Tensor:
    from diffquant.kernels.attention.prefill import prefill

    return prefill(call)


def _prefill_refuses(call: AttentionCall) -> str | None:
    from diffquant.kernels.attention.prefill import prefill_refusal

    return prefill_refusal(call)


def _prefill_int8(call: AttentionCall, pv: str) -> Tensor:
    from diffquant.kernels.attention.prefill_int8 import prefill_int8

    return prefill_int8(call, pv)


def _prefill_int8_refuses(call: AttentionCall, pv: str) -> str | None:
    from diffquant.kernels.attention.prefill_int8 import prefill_int8_refusal

    return prefill_int8_refusal(call, pv)


def _specialized(call: AttentionCall, bits: int) -> Tensor:
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized

    return prefill_specialized(call, bits)


def _specialized_refuses(call: AttentionCall, bits: int) -> str | None:
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized_refusal

    return prefill_specialized_refusal(call, bits)


def _simulated(call: AttentionCall, specialized: bool) -> Tensor:
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated

    return prefill_simulated(call, specialized)


def _simulated_refuses(call: AttentionCall, specialized: bool) -> str | None:
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated_refusal

    return prefill_simulated_refusal(call, specialized)


def _is_worth_fusing(call: AttentionCall) -> bool:
    # Two maps in one kernel read V once. A plain Transformer has nothing to fuse.
    return call.maps == 2 and call.length > _FEW_QUERIES


register(
    Backend("triton", _with_own_noise(_prefill), _on_a_device(_prefill_refuses), priority=30, pays=_is_worth_fusing)
)
register(
    Backend(
        "triton-simulated",
        _with_own_noise(partial(_simulated, specialized=False)),
        _on_a_device(partial(_simulated_refuses, specialized=False)),
        logits="quantized",
        priority=30,
    )
)
# Used by name alone: they are faster, but about 1 % away from what the model computes, and some percent with P·V in
# fp8 too.
for _name, _pv in (("triton-int8", "fp16"), ("triton-fp8", "fp8")):
    _compute = _with_own_noise(partial(_prefill_int8, pv=_pv))
    register(Backend(_name, _compute, _on_a_device(partial(_prefill_int8_refuses, pv=_pv))))
# Used by name alone until a GPU has run them: they compute what the kernels without "specialized" in their names do.
register(
    Backend(
        "triton-simulated-specialized",
        _with_own_noise(partial(_simulated, specialized=True)),
        _on_a_device(partial(_simulated_refuses, specialized=True)),
        logits="quantized",
    )
)
for _name, _bits in (("triton-specialized", 16), ("triton-fp8-specialized", 8)):
    _compute = _with_own_noise(partial(_specialized, bits=_bits))
    register(Backend(_name, _compute, _on_a_device(partial(_specialized_refuses, bits=_bits))))
