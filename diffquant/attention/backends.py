"""Who can compute an attention, and why one cannot."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from diffquant.attention.call import Call
from diffquant.attention.composed import flash_attn, flashdiff1, flashdiff2
from diffquant.attention.fused import fused, fused_fp8, fused_int8, refused_by_fp8, refused_by_fused, refused_by_int8
from diffquant.attention.naive import naive
from diffquant.errors import UsageError
from diffquant.family.norm import pair_norm
from diffquant.scheme import Scheme


@dataclass(frozen=True)
class Backend:
    """One way to compute a call, and why it cannot serve one (None where it can)."""

    compute: Callable[[Call], Tensor]
    refused: Callable[[Call], str | None] = lambda call: None


def _then_norm(attention: Callable[..., Tensor]) -> Callable[[Call], Tensor]:
    """A backend's computation from a function of `naive`'s arguments."""
    return lambda call: pair_norm(attention(call.q, call.k, call.v, call.lam, call.scale, call.mask), call.post)


@cache
def has_flash_attn() -> bool:
    """Whether the flash-attn package is installed; looked up once, since every layer of every step asks."""
    return find_spec("flash_attn") is not None


def _refused_by_flash_attn(call: Call) -> str | None:
    if not call.v.is_cuda:
        return "flash-attn runs on CUDA only"
    if call.v.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {call.v.dtype}"
    if call.mask.keys is not None or call.mask.window is not None:
        return "flash-attn is called without padding masks and windows here"
    return None if has_flash_attn() else "the flash-attn package is not installed: pip install flash-attn"


BACKENDS: dict[str, Backend] = {
    "naive": Backend(_then_norm(naive)),
    "flashdiff1": Backend(_then_norm(flashdiff1)),
    "flashdiff2": Backend(_then_norm(flashdiff2)),
    "flash_attn": Backend(_then_norm(flash_attn), _refused_by_flash_attn),
    "triton": Backend(fused, refused_by_fused),
    "triton-int8": Backend(fused_int8, refused_by_int8),
    "triton-fp8": Backend(fused_fp8, refused_by_fp8),
}


def check_backend(name: str, logits: Iterable[Scheme] = ()) -> None:
    """Check a name that a user gave, for attention with logits at any of some schemes.

    Raises:
        UsageError: it is neither "auto" nor a backend, or one that cannot quantize logits and is to.
    """
    if name not in ("auto", *BACKENDS):
        raise UsageError(f"unknown attention backend {name!r}; known are auto, {', '.join(BACKENDS)}")
    if name not in ("auto", "naive") and any(scheme.quantizes for scheme in logits):
        raise UsageError(
            f"attention backend {name!r} keeps logits inside its kernel and cannot quantize them; use auto or naive"
        )
