"""Who computes an attention: the fastest backend that can, or the one asked for."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from diffquant.attention.composed import flash_attn, flashdiff1, flashdiff2
from diffquant.attention.logits import LogitMeter
from diffquant.attention.mask import Mask
from diffquant.attention.naive import naive
from diffquant.attention.op import as_op
from diffquant.attention.simulated import simulated
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.scheme import FULL, Scheme

Backend = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor | None, float, Mask], Tensor]

BACKENDS: dict[str, Backend] = {
    "naive": naive,
    "flashdiff1": flashdiff1,
    "flashdiff2": flashdiff2,
    "flash_attn": flash_attn,
    "op": as_op,
}


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
    ranges: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention (or plain, with one map), see `naive` for the arguments.

    Args:
        meter: counts what a logit quantizer did.
        ranges: [maps·h] of a static logit scheme.
        backend: a name in `BACKENDS`, or "auto".

    Raises:
        UsageError: arguments disagree in shape, dtype or device, or the backend is unknown or cannot
            do what is asked.
        MissingDependencyError: the backend's package is not installed.
    """
    _check_arguments(q, k, v, lam)
    if logits.granularity == "static" and (ranges is None or ranges.numel() != len(q) * q[0].shape[1]):
        raise UsageError(f"logits at {logits} need {len(q) * q[0].shape[1]} calibrated ranges, one a head of each map")
    if logits.quantizes:
        if backend not in ("auto", "naive"):
            raise UsageError(f"attention backend {backend!r} keeps logits inside its kernel and cannot quantize them")
        if backend == "naive":
            return naive(q, k, v, lam, scale, mask, logits, ranges)
        return simulated(q, k, v, lam, scale, mask, logits, meter, ranges)
    name = fastest(q, mask) if backend == "auto" else backend
    if name not in BACKENDS:
        raise UsageError(f"unknown attention backend {name!r}; known are auto, {', '.join(BACKENDS)}")
    if name == "flash_attn":
        _require_flash_attn(q, mask)
    return BACKENDS[name](q, k, v, lam, scale, mask)


def fastest(q: Sequence[Tensor], mask: Mask) -> str:
    """Name of the fastest backend that serves these tensors, by measurement."""
    if has_flash_attn() and refused_by_flash_attn(q, mask) is None:
        return "flash_attn"
    # SDPA's flash kernels want values as wide as keys and fall back to full maps for wider ones, so V's
    # halves go in calls of their own; with values as wide as keys there is one half and nothing lost.
    return "flashdiff2"


@cache
def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed; looked up once, since every layer of every step asks."""
    return find_spec("flash_attn") is not None


def refused_by_flash_attn(q: Sequence[Tensor], mask: Mask) -> str | None:
    """Why the flash-attn package cannot serve these tensors, or None."""
    if not q[0].is_cuda:
        return "flash-attn runs on CUDA only"
    if q[0].dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {q[0].dtype}"
    if mask.keys is not None or mask.window is not None:
        return "flash-attn is called without padding masks and windows here"
    return None


def _require_flash_attn(q: Sequence[Tensor], mask: Mask) -> None:
    reason = refused_by_flash_attn(q, mask)
    if reason:
        raise UsageError(f"attention backend 'flash_attn': {reason}; use auto")
    if not has_flash_attn():
        raise MissingDependencyError(
            "attention backend 'flash_attn' needs the flash-attn package: pip install flash-attn"
        )


def _check_arguments(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None) -> None:
    maps = len(q)
    if maps not in (1, 2) or len(k) != maps or (lam is None) != (maps == 1):
        raise UsageError(
            f"attention takes one map without λ or two with it; got {maps} Q, {len(k)} K, λ {lam is not None}"
        )
    if len({(x.dtype, x.device) for x in (*q, *k, v)}) > 1:
        raise UsageError(f"attention: q, k and v mix {sorted({f'{x.dtype} on {x.device}' for x in (*q, *k, v)})}")
    batch, heads, _, width = q[0].shape
    kv_shape = (batch, v.shape[1], v.shape[2], width)
    wrong = [f"q {list(x.shape)}" for x in q if x.shape != q[0].shape]
    wrong += [f"k {list(x.shape)}" for x in k if x.shape != kv_shape]
    if wrong or v.shape[0] != batch or heads % v.shape[1]:
        raise UsageError(
            f"attention: shapes disagree: q {list(q[0].shape)}, v {list(v.shape)}" + "".join(f", {w}" for w in wrong)
        )
