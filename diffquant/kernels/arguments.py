"""What the attention kernels are told beside their tensors, and the checks they share.

Shapes: B batch, T queries, S keys, h pairs, h_kv KV pairs, d query and key width, dv value width.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm

HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees. Queries are the last T of the S positions.

    Attributes:
        causal: a query sees keys up to its own position.
        window: with `causal`, how many keys a query sees at most, its own included; None for all.
        starts: int32 [B], each sequence's first valid position (left padding); None for 0.
        ends: int32 [B], one past each sequence's last valid position; None for S.

    Keys outside the valid range are hidden. With `causal` a query outside it sees nothing. A query that
    sees nothing gives 0.
    """

    causal: bool = True
    window: int | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise UsageError(f"a sliding window needs causal order and at least 1 key, got {self.window}")


@dataclass(frozen=True)
class AttentionShape:
    """The lengths of one call, as in this module's docstring; `maps` is 1 or 2."""

    batch: int
    pairs: int
    kv_pairs: int
    queries: int
    keys: int
    width: int
    value_width: int
    maps: int

    @property
    def group(self) -> int:
        """Query pairs that share a KV pair."""
        return self.pairs // self.kv_pairs


def attention_shape(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    seen: Visibility,
    post: PairNorm | None = None,
) -> AttentionShape:
    """The lengths of a call whose arguments agree.

    Args:
        q: one [B, h, T, d] a map, one or two maps.
        k: one [B, h_kv, S, d] a map; the same tensor twice where the maps share keys (V2).
        v: [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.

    Raises:
        UsageError: arguments disagree in number, shape, dtype or device; all that do are named.
    """
    maps = len(q)
    if maps not in (1, 2) or len(k) != maps or (lam is None) != (maps == 1):
        raise UsageError(
            f"attention takes one map without λ or two with it; got {maps} Q, {len(k)} K, λ {lam is not None}"
        )
    named = {**_numbered("q", q), **_numbered("k", k), "v": v}
    flat = [f"{name} {list(x.shape)}" for name, x in named.items() if x.dim() != 4]
    if flat:
        raise UsageError(f"attention: tensors are [batch, heads, length, width]; got {', '.join(flat)}")
    batch, pairs, queries, width = q[0].shape
    kv_pairs, keys, value_width = v.shape[1:]
    shape = AttentionShape(batch, pairs, kv_pairs, queries, keys, width, value_width, maps)
    wanted = {
        **dict.fromkeys(_numbered("q", q), (batch, pairs, queries, width)),
        **dict.fromkeys(_numbered("k", k), (batch, kv_pairs, keys, width)),
        "v": (batch, kv_pairs, keys, value_width),
    }
    wrong = [
        f"{name} {list(x.shape)}, not {list(wanted[name])}" for name, x in named.items() if x.shape != wanted[name]
    ]
    if lam is not None and not _broadcasts(lam, (batch, pairs, queries, 1)):
        wrong.append(f"lam {list(lam.shape)}, not one value or {[batch, pairs, queries, 1]}")
    for name, limits in (("starts", seen.starts), ("ends", seen.ends)):
        if limits is not None and (limits.shape != (batch,) or limits.dtype != torch.int32):
            wrong.append(f"{name} {limits.dtype} {list(limits.shape)}, not int32 {[batch]}")
    weight = post.weight if post else None
    if weight is not None and weight.shape != (value_width,):
        wrong.append(f"norm weight {list(weight.shape)}, not {[value_width]}")
    if wrong:
        raise UsageError(f"attention: q is {list(q[0].shape)}, v {list(v.shape)}: {'; '.join(wrong)}")
    if kv_pairs == 0 or pairs % kv_pairs:
        raise UsageError(f"attention: {kv_pairs} KV pairs do not divide {pairs} query pairs")
    _require_one_place(named, {"lam": lam, "starts": seen.starts, "ends": seen.ends, "norm weight": weight})
    return shape


def refused_device(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a device, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if not _has_triton():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0 (Ampere) or newer"
    return None


@cache
def _has_triton() -> bool:
    """Looked up once, since every layer of every step asks."""
    return find_spec("triton") is not None


def refused_widths(q: Tensor, v: Tensor, dtypes: Collection[torch.dtype] = HALF_TYPES) -> str | None:
    """Why an attention kernel for head widths 64 and 128, values as wide or twice as wide, refuses these, or None."""
    if q.dtype not in dtypes:
        return f"q, k and v are {_short(q.dtype)}; the kernel takes {' and '.join(map(_short, dtypes))}"
    width, value_width = q.shape[-1], v.shape[-1]
    if width not in (64, 128):
        return f"q and k are {width} wide; the kernel takes head widths 64 and 128"
    if value_width not in (width, 2 * width):
        return f"v is {value_width} wide; with keys {width} wide the kernel takes {width} and {2 * width}"
    return None


def empty_output(q: Tensor, value_width: int) -> Tensor:
    """[B, h, T, dv] whose memory is [B, T, h, dv], so that the output projection flattens heads without a copy."""
    batch, pairs, queries, _ = q.shape
    return q.new_empty(batch, queries, pairs, value_width).transpose(1, 2)


def _numbered(name: str, maps: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: maps[0]} if len(maps) == 1 else {f"{name}{i}": each for i, each in enumerate(maps, 1)}


def _broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() <= len(shape) and all(
        size in (1, want) for size, want in zip(reversed(x.shape), reversed(shape), strict=False)
    )


def _require_one_place(attended: dict[str, Tensor], beside: dict[str, Tensor | None]) -> None:
    if len({x.dtype for x in attended.values()}) > 1:
        raise UsageError(f"attention: {', '.join(f'{n} is {_short(x.dtype)}' for n, x in attended.items())}; use one")
    placed = attended | {name: x for name, x in beside.items() if x is not None}
    if len({x.device for x in placed.values()}) > 1:
        raise UsageError(f"attention: {', '.join(f'{n} is on {x.device}' for n, x in placed.items())}; use one device")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
