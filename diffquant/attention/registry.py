"""The registry of attention backends, which the files of `diffquant.attention.backends` fill."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall


def _serves_all(_call: AttentionCall) -> str | None:
    return None


def _always(_call: AttentionCall) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: name by which users choose it.
        compute: function from a call to its [B, h, T, dv], the pair norm included.
        refuses: function from a call to the reason why the backend cannot serve it, or None if it can.
        logits: maps that it supports: "full", "quantized" (logits or softmax weights are rounded), or "both".
        priority: rank for "auto": among backends that serve a call, the highest computes it; 0 means that a backend
            is used only by name.
        rounds_operands: whether it rounds queries and keys itself, of maps that are rounded as well.
        pays: rule for "auto" that says whether the backend is worth considering for a call.
    """

    name: str
    compute: Callable[[AttentionCall], Tensor]
    refuses: Callable[[AttentionCall], str | None] = _serves_all
    logits: Literal["full", "quantized", "both"] = "full"
    priority: int = 0
    rounds_operands: bool = False
    pays: Callable[[AttentionCall], bool] = _always

    def takes(self, rounds_maps: bool) -> bool:
        """Whether it supports calls that round their maps, or those that do not."""
        return self.logits in ("both", "quantized" if rounds_maps else "full")


BACKENDS: dict[str, Backend] = {}
# Name of the kernel that decodes from latents: models with latent attention look for it.
LATENT = "triton-latent"


def register(backend: Backend) -> None:
    """Register a backend under its name.

    Raises:
        UsageError: the name is taken.
    """
    if backend.name in ("auto", *BACKENDS):
        raise UsageError(f"an attention backend {backend.name!r} is there already; choose another name")
    BACKENDS[backend.name] = backend


def by_priority(rounds_maps: bool) -> list[Backend]:
    """Backends to try for "auto", where a call rounds its maps or does not, the fastest first."""
    candidates = [backend for backend in BACKENDS.values() if backend.priority and backend.takes(rounds_maps)]
    return sorted(candidates, key=lambda backend: -backend.priority)


def check_backend(name: str, rounds_maps: Iterable[bool] = ()) -> None:
    """Check a user's choice of backend for layers that round their maps or do not.

    Raises:
        UsageError: it is neither "auto" nor a backend, or the backend does not support such maps.
    """
    if name == "auto":
        return
    if name not in BACKENDS:
        raise UsageError(f"unknown attention backend {name!r}; known are auto, {', '.join(sorted(BACKENDS))}")
    refused = [rounds for rounds in rounds_maps if not BACKENDS[name].takes(rounds)]
    if any(refused):
        raise UsageError(
            f"attention backend {name!r} keeps logits inside its kernel and cannot quantize them or their softmax; "
            "use auto or naive"
        )
    if refused:
        raise UsageError(f"attention backend {name!r} computes only quantized maps; use auto or naive")
