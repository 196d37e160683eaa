"""The layout of heads in an attention's projections: which rows belong to which head of which map.

After loading, heads are in canonical order: all signal heads, then all noise heads. A pair is a signal head and the
noise head subtracted from it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HeadOrder = Literal["adjacent", "halves"]
ChannelOrder = Literal["half", "interleaved"]
Projection = Literal["q_proj", "k_proj", "v_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj")


def each_pairs_noise(noise: Tensor, pairs: int) -> Tensor:
    """Repeat noise heads [B, n, ...], which pairs may share, to one per pair, [B, h, ...]."""
    sharing = pairs // noise.shape[1]
    return noise if sharing == 1 else noise.repeat_interleave(sharing, 1)


@dataclass(frozen=True)
class HeadLayout:
    """How the outputs of the Q, K and V projections divide into heads.

    Attributes:
        pairs: h, number of signal heads, or of heads with one map.
        kv_pairs: h_kv, number of KV pairs; divides the noise heads.
        head_dim: d, width of a query or key.
        value_dim: dv, width of a value.
        maps: number of maps, 2, or 1 for a plain Transformer.
        shares_keys: whether both maps read the same keys (V2).
        signals_per_noise: number of signal heads that one noise head is subtracted from.
        head_order: "adjacent" (the signal heads that share a noise head stand together, their noise head behind
            them; a value's rows stand together) or "halves" (all signal heads, then all noise heads; first halves of
            all values, then second halves).
        channel_order: order of a head's rows, named after those that rotation turns together: "half" (i, i + d/2) or
            "interleaved" (2i, 2i + 1).
    """

    pairs: int
    kv_pairs: int
    head_dim: int
    value_dim: int
    maps: int = 2
    shares_keys: bool = False
    signals_per_noise: int = 1
    head_order: HeadOrder = "adjacent"
    channel_order: ChannelOrder = "half"

    @property
    def noises(self) -> int:
        """Number of noise heads of Q."""
        return self.pairs // self.signals_per_noise if self.maps == 2 else 0

    @property
    def query_heads(self) -> int:
        return self.pairs + self.noises

    @property
    def key_heads(self) -> int:
        return self.kv_pairs if self.shares_keys else self.maps * self.kv_pairs

    def height(self, projection: Projection) -> int:
        """Number of rows of a projection's weight."""
        heads = {"q_proj": self.query_heads, "k_proj": self.key_heads, "v_proj": self.kv_pairs}[projection]
        return heads * (self.value_dim if projection == "v_proj" else self.head_dim)

    def queries(self, projected: Tensor) -> Tensor:
        """A view of the Q projection's output as heads.

        Args:
            projected: [..., T, height("q_proj")].

        Returns:
            [..., query_heads, T, d] in canonical order, channels unchanged.
        """
        return self._heads(projected, self.pairs, self.noises)

    def keys(self, projected: Tensor) -> Tensor:
        """A view of the K projection's output as heads [..., key_heads, T, d], as `queries` gives Q's."""
        return self._heads(projected, self.kv_pairs, self.key_heads - self.kv_pairs)

    def values(self, projected: Tensor) -> Tensor:
        """A view of the V projection's output as values [..., h_kv, T, dv], as `queries` gives Q's."""
        if self.head_order == "halves":
            halves: Tensor = projected.unflatten(-1, (2, self.kv_pairs, self.value_dim // 2))
            return halves.movedim(-2, -4).flatten(-2)
        values: Tensor = projected.unflatten(-1, (self.kv_pairs, self.value_dim))
        return values.transpose(-2, -3)

    def query_maps(self, q: Tensor) -> tuple[Tensor, ...]:
        """Each map's queries [B, h or noise heads, T, d], from all of them in canonical order."""
        return q.split([self.pairs, self.noises], 1) if self.maps == 2 else (q,)

    def key_maps(self, k: Tensor) -> tuple[Tensor, ...]:
        """Each map's keys [B, h_kv, S, d], from all in canonical order; one tensor twice where maps share keys."""
        return (k,) * self.maps if self.shares_keys else k.chunk(self.maps, 1)

    def rows(self, projection: Projection) -> Tensor:
        """Index of the row that holds each channel of each head in a projection.

        Returns:
            int64 [query_heads or key_heads, d], or [h_kv, dv]: heads in canonical order, channels in "half" order.
        """
        numbers = torch.arange(self.height(projection))[None]
        if projection == "v_proj":
            return self.values(numbers).squeeze(-2)
        heads = (self.queries(numbers) if projection == "q_proj" else self.keys(numbers)).squeeze(-2)
        if self.channel_order == "interleaved":
            return torch.cat([heads[:, 0::2], heads[:, 1::2]], 1)
        return heads

    def order_as(self, target: "HeadLayout", projection: Projection) -> Tensor | None:
        """Permutation of a projection's rows into another layout of the same heads.

        If `target` has more noise heads, each noise head of this layout is repeated for them: grouped attention becomes
        equivalent plain pairs.

        Returns:
            int64 [target.height(projection)], the row of this layout for each row of the target, or None if no row
            moves.

        Raises:
            ValueError: the layouts do not have the same heads, or the target's noise heads serve more signal heads.
        """
        self._check_same_heads(target)
        rows = self.rows(projection)
        if projection == "q_proj" and self.noises:
            repeats = target.noises // self.noises
            rows = torch.cat([rows[: self.pairs], rows[self.pairs :].repeat_interleave(repeats, 0)])
        order = torch.empty(target.height(projection), dtype=torch.int64)
        order[target.rows(projection).flatten()] = rows.flatten()
        return None if torch.equal(order, torch.arange(self.height(projection))) else order

    def _heads(self, projected: Tensor, signals: int, noises: int) -> Tensor:
        """Heads [..., signals + noises, T, d] in canonical order, of projected [..., T, (signals + noises)·d]."""
        if self.head_order == "halves" or not noises:
            heads: Tensor = projected.unflatten(-1, (signals + noises, self.head_dim))
            return heads.transpose(-2, -3)
        signals_per_noise = signals // noises
        groups: Tensor = projected.unflatten(-1, (noises, signals_per_noise + 1, self.head_dim))
        if signals_per_noise == 1:
            return groups.movedim(-2, -4).transpose(-2, -3).flatten(-4, -3)
        parts = groups.split([signals_per_noise, 1], -2)
        return torch.cat([part.flatten(-3, -2) for part in parts], -2).transpose(-2, -3)

    def _check_same_heads(self, target: "HeadLayout") -> None:
        counts = [(x.pairs, x.kv_pairs, x.head_dim, x.value_dim, x.maps, x.shares_keys) for x in (self, target)]
        if counts[0] != counts[1] or self.signals_per_noise % target.signals_per_noise:
            raise ValueError(f"{self} has other heads than {target}")
