"""A walk through a model layer by layer: each layer's input, its rotated queries and keys, and its values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec
from diffquant.model.modeling import DiffLayer, DiffTransformer

# Logits computed at once; the blocks of a long sequence stay in a CPU's cache.
_BLOCK_ENTRIES = 1 << 21
CAUSAL = Mask()


@dataclass(frozen=True)
class Walk:
    """A model's layers over sequences [B, T] of one length without padding.

    Attributes:
        model: model that is walked through.
        rotary: cosines and sines of the positions, [1, T, d] each.
    """

    model: DiffTransformer
    rotary: tuple[Tensor, Tensor]

    @classmethod
    def over(cls, model: DiffTransformer, length: int) -> "Walk":
        positions = torch.arange(length, device=model.device)[None]
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        return cls(model, model.model.rotary_emb(like, position_ids=positions))

    @property
    def layers(self) -> list[DiffLayer]:
        return [cast(DiffLayer, layer) for layer in self.model.model.layers]

    def embed(self, ids: Tensor) -> Tensor:
        """Input [B, T, D] of the first layer."""
        x: Tensor = self.model.model.embed_tokens(ids)
        return x

    def run(self, layer: DiffLayer, x: Tensor) -> Tensor:
        """Output [B, T, D] of a layer under the model's recipe."""
        cache = self.model.new_cache() if self.model.model.has_quantized_cache else None
        y: Tensor = layer(x, self.rotary, CAUSAL, cache)
        return y

    def project(self, layer: DiffLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, of a layer, as `DiffAttention.project` gives them."""
        return layer.self_attn.project(layer.input_layernorm(x), self.rotary)


def causal_logits(q: Tensor, k: Tensor, spec: DiffSpec, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Logits Q·Kᵀ·scale of all maps in float32, by blocks of queries.

    Args:
        q: [B, query heads, T, d], first maps before second ones.
        k: [B, key heads, T, d].
        spec: specification of the attention.
        start: first query to yield.

    Yields:
        The position n of a block's first query, and its logits [B, query heads, R, S] against the S = n + R first
        keys: the entry of query r and key s is hidden where s > n + r.
    """
    batch, heads, length, _ = q.shape
    keys = _keys_of_maps(k, spec)
    rows = max(1, min(128, _BLOCK_ENTRIES // (batch * heads * length)))
    for first in range(start, length, rows):
        last = min(first + rows, length)
        products = q[:, :, first:last].float() @ keys[:, :, :last].float().mT
        yield first, products.mul_(spec.scale)


def visible_entries(heads: int, rows: int, keys: int) -> int:
    """Number of logits that the last `rows` queries of `keys` positions see, over heads."""
    hidden = rows * (rows - 1) // 2
    return heads * (rows * keys - hidden)


def batches(ids: Tensor, tokens: int) -> Sequence[Tensor]:
    """Windows [N, T] in batches of at most `tokens` tokens, one window at least."""
    windows: Sequence[Tensor] = ids.split(max(1, tokens // ids.shape[1]))
    return windows


def _keys_of_maps(k: Tensor, spec: DiffSpec) -> Tensor:
    """Keys [B, query heads, S, d], one head for each query head, from k [B, key heads, S, d]."""
    repeats = [heads // spec.kv_pairs for heads in (spec.pairs, spec.layout.noises)[: spec.maps]]
    maps = zip(spec.layout.key_maps(k), repeats, strict=True)
    return torch.cat([keys.repeat_interleave(times, 1) for keys, times in maps], 1)
