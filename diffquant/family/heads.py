"""Describes which output rows of attention projections belong to which head and attention map.

In memory, heads are in canonical order: all signal heads, then all noise heads. A pair is a signal head and the noise
head subtracted from it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HeadOrder = Literal["adjacent", "halves"]
ChannelOrder = Literal["half", "interleaved"]
Projection = Literal["q_proj", "k_proj", "v_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj")


def repeat_noise_heads(noise: Tensor, pairs: int) -> Tensor:
    """Repeat each of n shared noise heads [B, n, ...], so that each of h = `pairs` pairs has one: [B, h, ...]."""
    sharing = pairs // noise.shape[1]
    return noise if sharing == 1 else noise.repeat_interleave(sharing, 1)


@dataclass(frozen=True)
class HeadLayout:
    """The division of the Q, K and V projections' outputs into heads.

    A pair is a signal head and the noise head subtracted from it. Canonical order is all signal heads, then all noise
    heads.

    Attributes:
        pairs: h, number of signal heads; with one map, of query heads.
        kv_pairs: h_kv, number of KV pairs; divides the number of noise heads.
        head_dim: d, width of a query or key.
        value_dim: dv, width of a value.
        maps: number of maps, 2, or 1 for a plain Transformer.
        shares_keys: whether both maps read the same keys (V2).
        signals_per_noise: number of signal heads that one noise head is subtracted from.
        head_order: order of the heads in the checkpoint. "adjacent": each group of signal heads is followed by the
            noise head that it shares, and the rows of one value head are contiguous. "halves": all signal heads, then
            all noise heads; the first halves of all value heads, then their second halves.
        channel_order: order of the rows within a head, named after the two channels that rotary embedding rotates
            together: "half" (i and i + d/2) or "interleaved" (2i and 2i + 1).
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
    def noise_heads(self) -> int:
        """n, number of noise query heads; 0 with one map."""
        return self.pairs // self.signals_per_noise if self.maps == 2 else 0

    @property
    def query_heads(self) -> int:
        """Number of query heads of all maps."""
        return self.pairs + self.noise_heads

    @property
    def key_heads(self) -> int:
        """Number of key heads of all maps; keys that both maps share count once."""
        return self.kv_pairs if self.shares_keys else self.maps * self.kv_pairs

    def row_count(self, projection: Projection) -> int:
        """Return the number of rows of a projection's weight."""
        heads = {"q_proj": self.query_heads, "k_proj": self.key_heads, "v_proj": self.kv_pairs}[projection]
        return heads * (self.value_dim if projection == "v_proj" else self.head_dim)

    def view_queries(self, projected: Tensor) -> Tensor:
        """View the Q projection's output as heads.

        Args:
            projected: [..., T, row_count("q_proj")].

        Returns:
            [..., query_heads, T, d] in canonical order, channels unchanged.
        """
        return self._heads(projected, self.pairs, self.noise_heads)

    def view_keys(self, projected: Tensor) -> Tensor:
        """View the K projection's output as heads.

        Args:
            projected: [..., T, row_count("k_proj")].

        Returns:
            [..., key_heads, T, d] in canonical order, channels unchanged.
        """
        return self._heads(projected, self.kv_pairs, self.key_heads - self.kv_pairs)

    def view_values(self, projected: Tensor) -> Tensor:
        """View the V projection's output as heads.

        Args:
            projected: [..., T, row_count("v_proj")].

        Returns:
            [..., h_kv, T, dv].
        """
        if self.head_order == "halves":
            halves: Tensor = projected.unflatten(-1, (2, self.kv_pairs, self.value_dim // 2))
            return halves.movedim(-2, -4).flatten(-2)
        values: Tensor = projected.unflatten(-1, (self.kv_pairs, self.value_dim))
        return values.transpose(-2, -3)

    def split_query_maps(self, q: Tensor) -> tuple[Tensor, ...]:
        """Split queries in canonical order into maps: [B, h, T, d] and, with two maps, [B, n, T, d]."""
        return q.split([self.pairs, self.noise_heads], 1) if self.maps == 2 else (q,)

    def split_key_maps(self, k: Tensor) -> tuple[Tensor, ...]:
        """Split keys in canonical order into one [B, h_kv, S, d] per map; shared keys are returned twice."""
        return (k,) * self.maps if self.shares_keys else k.chunk(self.maps, 1)

    def channel_rows(self, projection: Projection) -> Tensor:
        """Return the row of a projection's weight that computes each channel of each head.

        Returns:
            int64 [query_heads or key_heads, d], or [h_kv, dv]: heads in canonical order, channels in "half" order.
        """
        numbers = torch.arange(self.row_count(projection))[None]
        if projection == "v_proj":
            return self.view_values(numbers).squeeze(-2)
        heads = (self.view_queries(numbers) if projection == "q_proj" else self.view_keys(numbers)).squeeze(-2)
        if self.channel_order == "interleaved":
            return torch.cat([heads[:, 0::2], heads[:, 1::2]], 1)
        return heads

    def permutation_to(self, target: "HeadLayout", projection: Projection) -> Tensor | None:
        """Return the row permutation that converts a projection from this layout to another one of the same heads.

        If `target` has more noise heads, each noise head of this layout is repeated, so that fewer pairs share it. The
        result of attention does not change.

        Returns:
            int64 [target.row_count(projection)]: for each row of the target layout, its row in this layout; or None if
            the order is the same.

        Raises:
            ValueError: the layouts have different heads, or more pairs share a noise head in the target.
        """
        self._check_same_heads(target)
        rows = self.channel_rows(projection)
        if projection == "q_proj" and self.noise_heads:
            repeats = target.noise_heads // self.noise_heads
            rows = torch.cat([rows[: self.pairs], rows[self.pairs :].repeat_interleave(repeats, 0)])
        order = torch.empty(target.row_count(projection), dtype=torch.int64)
        order[target.channel_rows(projection).flatten()] = rows.flatten()
        return None if torch.equal(order, torch.arange(self.row_count(projection))) else order

    def _heads(self, projected: Tensor, signals: int, noises: int) -> Tensor:
        """View projected [..., T, (signals + noises)·d] as heads [..., signals + noises, T, d] in canonical order."""
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
            raise ValueError(
                f"{self} cannot be converted to {target}: their heads differ in number, size or signals per noise head"
            )
