"""The attention backends by name: each file of `diffquant.attention.backends` registers its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.scheme import Scheme


def _serves_all(_call: AttentionCall) -> str | None:
    return None


def _always(_call: AttentionCall) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: name that users choose it by.
        compute: function from a call to its [B, h, T, dv], the pair norm included.
        refuses: function from a call to the reason why it cannot serve it; None where it can.
        logits: precision of the logits it computes: "full", "quantized", or "both".
        priority: rank where nobody names a backend: of those that serve a call the highest computes it; 0 for one
            that is used by name alone.
        pays: rule that says whether it is worth asking about a call where nobody names it.
    """

    name: str
    compute: Callable[[AttentionCall], Tensor]
    refuses: Callable[[AttentionCall], str | None] = _serves_all
    logits: Literal["full", "quantized", "both"] = "full"
    priority: int = 0
    pays: Callable[[AttentionCall], bool] = _always

    def takes(self, logits: Scheme) -> bool:
        """Whether it computes logits at a scheme's precision."""
        return self.logits in ("both", "quantized" if logits.quantizes else "full")


BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Make a backend known by its name.

    Raises:
        UsageError: another one has that name.
    """
    if backend.name in ("auto", *BACKENDS):
        raise UsageError(f"an attention backend {backend.name!r} is there already; choose another name")
    BACKENDS[backend.name] = backend


def by_priority(logits: Scheme) -> list[Backend]:
    """Backends to try where nobody names one, for logits at a scheme, the fastest first."""
    candidates = [backend for backend in BACKENDS.values() if backend.priority and backend.takes(logits)]
    return sorted(candidates, key=lambda backend: -backend.priority)


def check_backend(name: str, logits: Iterable[Scheme] = ()) -> None:
    """Check a name that a user gave, for attention with logits at any of some schemes.

    Raises:
        UsageError: it is neither "auto" nor a backend, or one that does not compute such logits.
    """
    if name == "auto":
        return
    if name not in BACKENDS:
        raise UsageError(f"unknown attention backend {name!r}; known are auto, {', '.join(sorted(BACKENDS))}")
    refused = [scheme for scheme in logits if not BACKENDS[name].takes(scheme)]
    if any(scheme.quantizes for scheme in refused):
        raise UsageError(
            f"attention backend {name!r} keeps logits inside its kernel and cannot quantize them; use auto or naive"
        )
    if refused:
        raise UsageError(f"attention backend {name!r} computes quantized logits alone; use auto or naive")
