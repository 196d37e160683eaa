"""Registry of attention backends (files of `diffquant.attention.backends`), and the choice of one for a call."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.support.devices import log_once


@dataclass(frozen=True)
class Backend:
    """An implementation of attention, which users may choose by name.

    Attributes:
        name: name by which users choose it.
        compute: function that returns the output of a call, [B, h, T, dv], after the pair norm.
        refuses: function that returns the reason why the backend cannot serve a call, or None if it can.
        logits: supported calls: "full" (16-bit maps), "quantized" (quantized logits or softmax weights) or "both".
        priority: rank for "auto", which takes the highest-ranked backend that serves a call; 0 if the backend is used
            only when chosen by name.
        rounds_operands: whether it quantizes queries and keys itself (`AttentionCall.qk`).
        is_worthwhile: function for "auto" that returns whether the backend is expected to be fast for a call.
    """

    name: str
    compute: Callable[[AttentionCall], Tensor]
    refuses: Callable[[AttentionCall], str | None] = lambda _call: None
    logits: Literal["full", "quantized", "both"] = "full"
    priority: int = 0
    rounds_operands: bool = False
    is_worthwhile: Callable[[AttentionCall], bool] = lambda _call: True

    def supports(self, rounds_maps: bool) -> bool:
        """Return whether the backend supports calls with this value of `AttentionCall.has_quantized_maps`."""
        return self.logits in ("both", "quantized" if rounds_maps else "full")


BACKENDS: dict[str, Backend] = {}
# Name of the backend that decodes from stored latents; models with latent attention look it up.
LATENT = "triton-latent"
# Removed backends, with the ones that compute the same.
_REPLACED = {"triton-pipelined": "triton-specialized"}


def register(backend: Backend) -> None:
    """Register a backend under its name.

    Raises:
        UsageError: another backend has that name.
    """
    if backend.name in ("auto", *BACKENDS):
        raise UsageError(f"an attention backend {backend.name!r} exists already; choose another name")
    BACKENDS[backend.name] = backend


def find_auto_backends(rounds_maps: bool) -> list[Backend]:
    """Return the backends that "auto" tries, highest priority first, for calls with or without quantized maps."""
    candidates = [backend for backend in BACKENDS.values() if backend.priority and backend.supports(rounds_maps)]
    return sorted(candidates, key=lambda backend: -backend.priority)


def check_backend(name: str, rounds_maps: Iterable[bool] = ()) -> None:
    """Check that a backend exists and supports every layer of a model.

    Args:
        name: name of a backend, or "auto".
        rounds_maps: `AttentionCall.has_quantized_maps` of each layer.

    Raises:
        UsageError: no backend has that name, or the backend does not support the maps of some layer.
    """
    if name == "auto":
        return
    if name in _REPLACED:
        raise UsageError(f"attention backend {name!r} was replaced by {_REPLACED[name]!r}, which computes the same")
    if name not in BACKENDS:
        raise UsageError(f"unknown attention backend {name!r}; choose from auto, {', '.join(sorted(BACKENDS))}")
    refused = [rounds for rounds in rounds_maps if not BACKENDS[name].supports(rounds)]
    if any(refused):
        raise UsageError(
            f"attention backend {name!r} keeps logits inside its kernel and cannot quantize them or their softmax; "
            "use auto or naive"
        )
    if refused:
        raise UsageError(f"attention backend {name!r} computes only quantized attention; use auto or naive")


def attend(call: AttentionCall, backend: str = "auto") -> Tensor:
    """Compute differential attention, or plain attention if there is one map, with the backend from `backend_for`.

    Returns:
        [B, h, T, dv] in v's dtype.

    Raises:
        UsageError: the backend is unknown or does not support the call.
    """
    return backend_for(call, backend).compute(call)


def backend_for(call: AttentionCall, name: str = "auto") -> Backend:
    """Choose the backend that computes a call; log once, at level INFO, why higher-ranked ones do not.

    Args:
        call: tensors and options of the attention.
        name: name in `BACKENDS`, or "auto" for the highest-ranked backend that serves the call.

    Raises:
        UsageError: the backend is unknown or does not support the call, or no backend does; the message says why.
    """
    check_backend(name, [call.has_quantized_maps])
    if not call.q[0].numel() or not call.key_count:
        return _EMPTY
    if name != "auto":
        if refusal := _find_refusal(BACKENDS[name], call):
            raise UsageError(f"attention backend {name!r}: {refusal}; use auto")
        return BACKENDS[name]
    refusals = []
    for backend in find_auto_backends(call.has_quantized_maps):
        if not backend.is_worthwhile(call):
            continue
        refusal = _find_refusal(backend, call)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
        log_once(__name__, logging.INFO, "attention backend %s is not used: %s", backend.name, refusal)
    raise UsageError(f"no attention backend supports this call: {'; '.join(refusals)}")


def _find_refusal(backend: Backend, call: AttentionCall) -> str | None:
    """Return the reason why a backend cannot serve a call, or None."""
    if call.qk.quantizes and not backend.rounds_operands:
        return f"it does not quantize queries and keys itself (qk is {call.qk}); pass quantized ones without qk"
    return backend.refuses(call)


def _empty_output(call: AttentionCall) -> Tensor:
    call.record_in_meter()
    return call.v.new_zeros(*call.q[0].shape[:3], call.v.shape[-1])


# Computes calls with empty batches or sequences, or without keys, so that kernels need not handle them.
_EMPTY = Backend("empty", _empty_output)
