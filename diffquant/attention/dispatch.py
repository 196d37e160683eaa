"""Attention by the fastest backend that can compute it, or by the one asked for."""

import logging
from collections.abc import Sequence

from torch import Tensor

from diffquant.attention.registry import BACKENDS, Backend, by_priority, check_backend
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall, Meter
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.scheme import FULL, Scheme
from diffquant.support.logs import log_once


def attend(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    mask: Mask,
    logits: Scheme = FULL,
    meter: Meter | None = None,
    post: PairNorm | None = None,
    ranges: Tensor | None = None,
    signal_gate: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention, or plain attention with one map; arguments as `AttentionCall` has them.

    Args:
        backend: a name in `BACKENDS`, or "auto".

    Returns:
        [B, h, T, dv] in v's dtype.

    Raises:
        UsageError: arguments disagree in shape, dtype or device, or the backend is unknown or cannot
            do what is asked.
    """
    call = AttentionCall(q, k, v, lam, scale, mask, post, logits, ranges, meter, signal_gate)
    check_backend(backend, [logits])
    if not call.q[0].numel():
        # No kernel need know what no sequence, or no token, is.
        if meter is not None:
            meter.calls += int(logits.quantizes)
        return v.new_empty(*q[0].shape[:3], v.shape[-1])
    if backend == "auto":
        return fastest(call).compute(call)
    if refusal := BACKENDS[backend].refuses(call):
        raise UsageError(f"attention backend {backend!r}: {refusal}; use auto")
    return BACKENDS[backend].compute(call)


def fastest(call: AttentionCall) -> Backend:
    """The fastest backend that serves a call; why a faster one does not is logged once, at level INFO.

    Raises:
        UsageError: no backend serves it; each one's reason is named.
    """
    refusals = []
    for backend in by_priority(call.logits):
        if not backend.pays(call):
            continue
        refusal = backend.refuses(call)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
        log_once(__name__, logging.INFO, "attention backend %s is not used: %s", backend.name, refusal)
    raise UsageError(f"no attention backend serves this call: {'; '.join(refusals)}")
