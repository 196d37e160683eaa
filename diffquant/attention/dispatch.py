"""Chooses the backend that computes an attention: the fastest that can, or the requested one."""

import logging

from torch import Tensor

from diffquant.attention.registry import BACKENDS, Backend, by_priority, check_backend
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.support.logs import log_once


def attend(call: AttentionCall, backend: str = "auto") -> Tensor:
    """Differential attention, or plain attention with one map, by the backend that `backend_for` gives.

    Returns:
        [B, h, T, dv] in v's dtype.

    Raises:
        UsageError: the backend is unknown or cannot do what is asked.
    """
    return backend_for(call, backend).compute(call)


def backend_for(call: AttentionCall, name: str = "auto") -> Backend:
    """The backend that computes a call; logs once, at level INFO, why faster ones do not.

    Args:
        call: tensors and options of the attention.
        name: a name in `BACKENDS`, or "auto" for the fastest backend that serves the call.

    Raises:
        UsageError: the backend is unknown or cannot do what is asked, or none can; the message gives each one's reason.
    """
    check_backend(name, [call.rounds_maps])
    if not call.q[0].numel() or not call.keys:
        return _EMPTY
    if name != "auto":
        if refusal := _refusal(BACKENDS[name], call):
            raise UsageError(f"attention backend {name!r}: {refusal}; use auto")
        return BACKENDS[name]
    refusals = []
    for backend in by_priority(call.rounds_maps):
        if not backend.pays(call):
            continue
        refusal = _refusal(backend, call)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
        log_once(__name__, logging.INFO, "attention backend %s is not used: %s", backend.name, refusal)
    raise UsageError(f"no attention backend serves this call: {'; '.join(refusals)}")


def _refusal(backend: Backend, call: AttentionCall) -> str | None:
    """The reason why a backend cannot serve a call, or None."""
    if call.qk.quantizes and not backend.rounds_operands:
        return f"queries and keys at {call.qk} have to be rounded before the call"
    return backend.refuses(call)


def _of_nothing(call: AttentionCall) -> Tensor:
    call.count()
    return call.v.new_zeros(*call.q[0].shape[:3], call.v.shape[-1])


# Kernels do not have to handle empty batches or sequences, nor queries without a single key.
_EMPTY = Backend("empty", _of_nothing)
