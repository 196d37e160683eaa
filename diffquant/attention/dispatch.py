"""Who computes an attention: the fastest backend that can, or the one asked for."""

import logging
import warnings
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from diffquant.attention.backends import BACKENDS, check_backend
from diffquant.attention.call import Call
from diffquant.attention.fused import fused_simulated, refused_by_simulated
from diffquant.attention.logits import LogitMeter
from diffquant.attention.naive import naive
from diffquant.attention.simulated import simulated
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm, pair_norm
from diffquant.scheme import FULL, Scheme

# Below this many queries a fused prefill leaves most of its tile empty.
_FEW_QUERIES = 16


def attend(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    mask: Mask,
    logits: Scheme = FULL,
    meter: LogitMeter | None = None,
    post: PairNorm | None = None,
    ranges: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention (or plain, with one map), see `naive` for the arguments.

    Args:
        meter: counts what a logit quantizer did.
        post: norm over a pair's output; none by default.
        ranges: [maps·h] of a static logit scheme.
        backend: a name in `BACKENDS`, or "auto". With quantized logits "naive" or "auto".

    Raises:
        UsageError: arguments disagree in shape, dtype or device, or the backend is unknown or cannot
            do what is asked.
    """
    call = Call(q, k, v, lam, scale, mask, post)
    check_backend(backend, [logits])
    if logits.quantizes:
        return _attend_quantized(call, logits, meter, ranges, backend)
    name = fastest(call) if backend == "auto" else backend
    if backend != "auto" and (refusal := BACKENDS[name].refused(call)):
        raise UsageError(f"attention backend {name!r}: {refusal}; use auto")
    return BACKENDS[name].compute(call)


def fastest(call: Call) -> str:
    """Name of the fastest backend that serves a call; why a faster one does not is logged once, at level INFO."""
    # Two maps in one kernel read V once. A plain Transformer has nothing to fuse.
    preferred = ["triton"] if call.lam is not None and call.length > _FEW_QUERIES else []
    for name in (*preferred, "flash_attn"):
        refusal = BACKENDS[name].refused(call)
        if refusal is None:
            return name
        _log_once(name, refusal)
    # SDPA's flash kernels want values as wide as keys and fall back to full maps for wider ones, so V's
    # halves go in calls of their own; with values as wide as keys there is one half and nothing lost.
    return "flashdiff2"


def _attend_quantized(
    call: Call, logits: Scheme, meter: LogitMeter | None, ranges: Tensor | None, backend: str
) -> Tensor:
    heads = len(call.q) * call.q[0].shape[1]
    if logits.granularity == "static" and (ranges is None or ranges.numel() != heads):
        raise UsageError(f"logits at {logits} need {heads} calibrated ranges, one a head of each map")
    arguments = (call.q, call.k, call.v, call.lam, call.scale, call.mask, logits)
    if backend == "naive":
        return pair_norm(naive(*arguments, ranges), call.post)
    refusal = refused_by_simulated(call, logits)
    if refusal is None:
        return fused_simulated(call, logits, meter)
    if call.v.is_cuda:
        warnings.warn(f"logits are quantized in PyTorch, many times slower than in a kernel: {refusal}", stacklevel=2)
    return pair_norm(simulated(*arguments, meter, ranges), call.post)


@cache
def _log_once(backend: str, refusal: str) -> None:
    logging.getLogger(__name__).info("attention backend %s is not used: %s", backend, refusal)
