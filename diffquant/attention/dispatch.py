"""Computes attention with the fastest backend that can, or with the requested one."""

import logging

from torch import Tensor

from diffquant.attention.registry import BACKENDS, Backend, by_priority, check_backend
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.support.logs import log_once


def attend(call: AttentionCall, backend: str = "auto") -> Tensor:
    """Differential attention, or plain attention with one map.

    Args:
        call: tensors and options of the attention.
        backend: a name in `BACKENDS`, or "auto".

    Returns:
        [B, h, T, dv] in v's dtype.

    Raises:
        UsageError: the backend is unknown or cannot do what is asked.
    """
    check_backend(backend, [call.rounds_maps])
    if not call.q[0].numel():
        # Kernels do not have to handle empty batches or sequences.
        call.count()
        return call.v.new_empty(*call.q[0].shape[:3], call.v.shape[-1])
    if backend == "auto":
        return fastest(call).compute(call)
    if refusal := BACKENDS[backend].refuses(call):
        raise UsageError(f"attention backend {backend!r}: {refusal}; use auto")
    return BACKENDS[backend].compute(call)


def fastest(call: AttentionCall) -> Backend:
    """The fastest backend that serves a call; logs once, at level INFO, why faster ones do not.

    Raises:
        UsageError: no backend serves it; the message gives each one's reason.
    """
    refusals = []
    for backend in by_priority(call.rounds_maps):
        if not backend.pays(call):
            continue
        refusal = backend.refuses(call)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
        log_once(__name__, logging.INFO, "attention backend %s is not used: %s", backend.name, refusal)
    raise UsageError(f"no attention backend serves this call: {'; '.join(refusals)}")
