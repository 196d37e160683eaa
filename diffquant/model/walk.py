"""A walk through a model layer by layer: each layer's input, its queries and keys, and its values."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from diffquant.model.decoder import Decoder

# What goes from layer to layer.
State = TypeVar("State")

# Logits computed at once; the blocks of a long sequence stay in a CPU's cache.
_BLOCK_ENTRIES = 1 << 21
CAUSAL = Mask()


@dataclass(frozen=True)
class Walk(ABC, Generic[State]):
    """A model's layers over sequences [B, T] of one length without padding.

    Attributes:
        model: CausalModel that is walked through.
        length: number of tokens of a sequence.
    """

    model: Any
    length: int

    @property
    def layers(self) -> Sequence[Any]:
        """The layers in order."""
        return list(self.model.model.layers)

    def new_cache(self) -> "Cache | None":
        """A fresh cache for a layer: of a quantized one what it reads back counts, and of another nothing."""
        decoder: Decoder = self.model.model
        return decoder.new_cache() if decoder.has_quantized_cache else None

    @abstractmethod
    def embed(self, ids: Tensor) -> State:
        """Input of the first layer, for token ids [B, T]."""

    @abstractmethod
    def hidden(self, state: State) -> Tensor:
        """Hidden states [B, T, D] in the state passed between layers."""

    @abstractmethod
    def run(self, layer: nn.Module, state: State) -> State:
        """Output of a layer under the model's recipe."""

    @abstractmethod
    def project(self, layer: nn.Module, state: State) -> tuple[Tensor, Tensor, Tensor] | None:
        """Queries, keys and values of a layer's attention as it reads them, or None if the layer has no attention.

        Each is [B, heads, T, width], rotated where the model rotates, signal heads before noise heads.
        """

    def cached(
        self,
        layer: nn.Module,  # noqa: ARG002  most models cache what they project
        state: State,  # noqa: ARG002
        projections: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as the layer's cache keeps them, [B, heads, T, width] each, beside what `project` gives."""
        return projections[1:]

    @abstractmethod
    def attention_output(self, layer: nn.Module) -> nn.Module | None:
        """The Linear that a layer's attention ends with, or None if the layer has no attention."""

    def window(self, layer: nn.Module) -> int | None:  # noqa: ARG002  most models have none
        """Number of newest keys that a layer's queries see, or None if it has no window."""
        return None


def causal_logits(q: Tensor, k: Tensor, spec: DiffSpec) -> Iterator[tuple[int, Tensor]]:
    """Logits Q·Kᵀ·scale of all maps in float32, by blocks of queries.

    Args:
        q: [B, query heads, T, d], first maps before second ones.
        k: [B, key heads, T, d].
        spec: specification of the attention.

    Yields:
        The position n of a block's first query, and its logits [B, query heads, R, S] against the S = n + R first
        keys: the entry of query r and key s is hidden where s > n + r, or behind a window.
    """
    batch, heads, length, _ = q.shape
    keys = _keys_of_maps(k, spec)
    rows = max(1, min(128, _BLOCK_ENTRIES // (batch * heads * length)))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        products = q[:, :, first:last].float() @ keys[:, :, :last].float().mT
        yield first, products.mul_(spec.scale)


def visible_entries(heads: int, rows: int, keys: int, window: int | None = None) -> int:
    """Number of logits that the last `rows` queries of `keys` positions see, over heads."""
    seen = range(keys - rows + 1, keys + 1)
    return heads * sum(min(count, window or count) for count in seen)


def batches(ids: Tensor, tokens: int) -> Sequence[Tensor]:
    """Windows [N, T] in batches of at most `tokens` tokens, one window at least."""
    windows: Sequence[Tensor] = ids.split(max(1, tokens // ids.shape[1]))
    return windows


def _keys_of_maps(k: Tensor, spec: DiffSpec) -> Tensor:
    """Keys [B, query heads, S, d], one head for each query head, from k [B, key heads, S, d]."""
    repeats = [heads // spec.kv_pairs for heads in (spec.pairs, spec.layout.noises)[: spec.maps]]
    maps = zip(spec.layout.key_maps(k), repeats, strict=True)
    return torch.cat([keys.repeat_interleave(times, 1) for keys, times in maps], 1)
