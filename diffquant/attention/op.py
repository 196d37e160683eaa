"""`torch.ops.diffquant.differential_attention`: attention over a growing KV cache as one operator.

It means what `diffquant::DifferentialAttention` means in an ONNX graph (docs/differential-attention-op.md),
for caches in the activations' type whose present is as long as past and new tokens together. So
torch.compile and torch.onnx.export see one node where attention stands. Registered on import.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.attention.composed import flashdiff2
from diffquant.attention.naive import naive
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.scheme import FULL, Scheme


@torch.library.custom_op("diffquant::differential_attention", mutates_args=())
def differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    seqlens_k: Tensor,
    cos_cache: Tensor | None,
    sin_cache: Tensor | None,
    num_pairs: int,
    num_kv_pairs: int,
    generation: int,
    scale: float,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    logit_bits: int = 0,
    logit_granularity: str = "row",
    logit_shift: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, T, h·dv], present key [B, h_kv, P + T, dk] and present value [B, h_kv, P + T, dv].

    Args:
        query: [B, T, 2·h·d], each pair's q1 and q2 side by side.
        key: [B, T, h_kv·dk]; generation 1: each pair's k1 and k2 side by side.
        value: [B, T, h_kv·dv].
        lam: float32 [1] or [B, T, h].
        past_key, past_value: [B, h_kv, P, dk] and [B, h_kv, P, dv].
        seqlens_k: int32 [B], tokens of each sequence after this call, minus 1.
        cos_cache, sin_cache: [positions, dk/2]; None leaves Q and K as they are.
    """
    group = _Call(query, past_key, seqlens_k, num_pairs, num_kv_pairs, generation, local_window_size)
    interleaved = bool(rotary_interleaved)
    q, k = (
        _rotated(x.unflatten(-1, (-1, group.row)), cos_cache, sin_cache, group.positions, interleaved)
        for x in (query, key)
    )
    present_key = group.extended(past_key, k)
    present_value = group.extended(past_value, value.unflatten(-1, (num_kv_pairs, -1)))
    queries = q.flatten(2).unflatten(-1, (2 * num_pairs, -1)).transpose(1, 2)
    keys = [*present_key.chunk(2, -1)] if generation == 1 else [present_key, present_key]
    lams = lam if lam.dim() == 1 else lam.transpose(1, 2).unsqueeze(-1)
    maps = [queries[:, 0::2], queries[:, 1::2]]
    y = group.attend(maps, keys, present_value, lams, scale, _scheme(logit_bits, logit_granularity, logit_shift))
    return y.transpose(1, 2).flatten(2).contiguous(), present_key, present_value


@differential_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, lam: Tensor, past_key: Tensor, past_value: Tensor, *args: object
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, _ = query.shape
    # args starts with seqlens_k and the tables.
    pairs = args[3]
    if not isinstance(pairs, int):
        raise UsageError(f"differential_attention: num_pairs must be an integer, got {pairs!r}")
    width = past_value.shape[-1]
    rows = past_key.shape[2] + length
    return (
        query.new_empty(batch, length, pairs * width),
        past_key.new_empty(batch, past_key.shape[1], rows, past_key.shape[3]),
        past_value.new_empty(batch, past_value.shape[1], rows, width),
    )


def as_op(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, scale: float, mask: Mask) -> Tensor:
    """Attention of already rotated and cached tensors as one call of the operator; arguments as `naive`.

    Raises:
        UsageError: one map, a mask with padding, or none that is causal.
    """
    if lam is None or mask.keys is not None or not mask.causal:
        raise UsageError("attention backend 'op' is causal, has two maps and takes no padding; use auto")
    batch, heads, length, _ = q[0].shape
    shared = k[0] is k[1]
    rows = k[0] if shared else torch.cat([k[0], k[1]], -1)
    past = rows.shape[2] - length
    output, _, _ = differential_attention(
        _tokens(torch.stack([q[0], q[1]], 2).flatten(1, 2)),
        _tokens(rows[:, :, past:]),
        _tokens(v[:, :, past:]),
        lam.float().reshape(1) if lam.dim() < 4 else lam.float().squeeze(-1).transpose(1, 2),
        rows[:, :, :past],
        v[:, :, :past],
        torch.full((batch,), rows.shape[2] - 1, dtype=torch.int32, device=v.device),
        None,
        None,
        heads,
        v.shape[1],
        2 if shared else 1,
        scale,
        local_window_size=mask.window or -1,
    )
    return output.unflatten(-1, (heads, -1)).transpose(1, 2)


@dataclass
class _Call:
    """Where a call's tokens stand, and what they see."""

    query: Tensor
    past: Tensor
    seqlens_k: Tensor
    pairs: int
    kv_pairs: int
    generation: int
    window: int

    @property
    def length(self) -> int:
        return self.query.shape[1]

    @property
    def row(self) -> int:
        """dk."""
        return self.query.shape[2] // (self.pairs if self.generation == 1 else 2 * self.pairs)

    @property
    def start(self) -> Tensor:
        """[B] position of each sequence's first new token; 0 in a first call."""
        before = self.seqlens_k.long() + 1 - self.length
        return torch.zeros_like(before) if self.past.shape[2] == 0 else before

    @property
    def positions(self) -> Tensor:
        """[B, T]."""
        return self.start[:, None] + torch.arange(self.length, device=self.query.device)

    def extended(self, past: Tensor, new: Tensor) -> Tensor:
        """past [B, h_kv, P, w] with new [B, T, h_kv, w] written from `start` on: [B, h_kv, P + T, w]."""
        everything = torch.cat([past, new.transpose(1, 2)], 2)
        rows = past.shape[2]
        since = torch.arange(rows + self.length, device=past.device) - self.start[:, None]
        is_new = (since >= 0) & (since < self.length)
        kept = torch.arange(rows + self.length, device=past.device).expand_as(since)
        picked = torch.where(is_new, since + rows, kept)[:, None, :, None]
        return everything.gather(2, picked.expand_as(everything))

    def attend(self, q: list[Tensor], k: list[Tensor], v: Tensor, lam: Tensor, scale: float, logits: Scheme) -> Tensor:
        keys = v.shape[2]
        whole = bool((self.seqlens_k == keys - 1).all())
        if whole and self.window < 0 and not logits.quantizes:
            return flashdiff2(q, k, v, lam, scale, Mask())
        column = torch.arange(keys, device=v.device)
        position = self.positions[:, :, None]
        seen = (column <= position) & (position <= self.seqlens_k[:, None, None])
        if self.window > 0:
            seen &= column > position - self.window
        return naive(q, k, v, lam, scale, _Seen(keys=None, seen=seen[:, None]), logits)


@dataclass(frozen=True)
class _Seen(Mask):
    """A mask spelled out: `seen` [B, 1, T, S]."""

    seen: Tensor | None = None

    def visible(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor | None:
        return None if self.seen is None else self.seen[:, :, queries]


def _rotated(
    rows: Tensor, cos_cache: Tensor | None, sin_cache: Tensor | None, positions: Tensor, interleaved: bool
) -> Tensor:
    """[B, T, rows, dk] rotated by position; a column of the tables for each channel pair."""
    if cos_cache is None or sin_cache is None:
        return rows
    # Padding may stand beyond the tables; what it becomes is not seen.
    at = positions.clamp(max=cos_cache.shape[0] - 1)
    cos, sin = (table[at].unsqueeze(2).to(rows.dtype) for table in (cos_cache, sin_cache))
    if interleaved:
        a, b = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = rows.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _scheme(bits: int, granularity: str, shift: int) -> Scheme:
    return Scheme(bits, granularity, shift=bool(shift)) if bits else FULL


def _tokens(heads: Tensor) -> Tensor:
    """[B, H, T, w] -> [B, T, H·w]."""
    return heads.transpose(1, 2).flatten(2)
