"""Runs a model layer by layer, giving access to each layer's input, queries, keys and values."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from diffquant.model.decoder import Decoder, DecoderLayer

# State passed between layers, such as hidden states.
State = TypeVar("State")

# Largest number of tokens per forward pass of a layer, unless the caller passes another number.
BATCH_TOKENS = 4096
# Number of logits computed at once, so that blocks fit in a CPU's cache.
_BLOCK_ENTRIES = 1 << 21
CAUSAL = Mask()


class LayerRunner(Generic[State]):
    """Runs a model's layers one by one over unpadded sequences [B, T] of one length."""

    def __init__(self, decoder: "Decoder", length: int) -> None:
        self.decoder = decoder
        # `layer_arguments` uses only the shape, dtype and device of this tensor.
        self._like = torch.empty(1, length, 0, dtype=decoder.dtype, device=decoder.device)
        # The rotary tables, which every layer and batch shares.
        self._uncached = decoder.layer_arguments(self._like, CAUSAL, 0, None, None)

    @property
    def layers(self) -> Sequence[Any]:
        """Layers in order."""
        return list(self.decoder.layers)

    def layer_arguments(self, layer: nn.Module, cache: "Cache | None" = None) -> tuple[Any, ...]:
        """Return the arguments that a layer's forward takes after the state."""
        number = cast("DecoderLayer", layer).layer
        if cache is None:
            return self._uncached[number]
        return self.decoder.layer_arguments(self._like, CAUSAL, 0, None, cache)[number]

    def embed(self, ids: Tensor) -> State:
        """Compute the first layer's input from token ids [B, T]."""
        state: State = self.decoder.initial_state(self.decoder.embed_tokens(ids))
        return state

    def hidden_states(self, state: State) -> Tensor:
        """Return the hidden states [B, T, D] contained in the state passed between layers."""
        return self.decoder.hidden_states(state)

    def run_layer(self, layer: nn.Module, state: State) -> State:
        """Compute the output of a layer under the model's recipe; use a new cache if the recipe quantizes the cache."""
        cache = self.decoder.new_cache() if self.decoder.has_quantized_cache else None
        output: State = layer(state, *self.layer_arguments(layer, cache))
        return output

    def project(self, layer: nn.Module, state: State) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return a layer's queries, keys and values, [B, heads, T, width] each, or None if it has no attention.

        They are taken after rotary embedding, if any, and signal heads precede noise heads.
        """
        return cast("DecoderLayer", layer).project(state, *self.layer_arguments(layer))

    def cached_keys_and_values(
        self, layer: nn.Module, state: State, projections: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values, or latents, that the layer caches, [B, heads, T, width] each.

        Args:
            layer: layer.
            state: input of the layer.
            projections: result of `project` for this input.
        """
        return cast("DecoderLayer", layer).cached_latents(state, *self.layer_arguments(layer)) or projections[1:]


def iterate_unmasked_logits(q: Tensor, k: Tensor, spec: DiffSpec) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits Q·Kᵀ·scale of all maps in float32, by blocks of queries.

    Args:
        q: [B, query heads, T, d], heads of the first map before those of the second.
        k: [B, key heads, T, d].
        spec: specification of the attention.

    Yields:
        The position n of the block's first query, and the logits [B, query heads, R, S] of its R queries with the first
        S = n + R keys. No mask is applied: query r does not see keys s > n + r, nor those outside a window.
    """
    batch, heads, length, _ = q.shape
    keys = _keys_of_maps(k, spec)
    rows = max(1, min(128, _BLOCK_ENTRIES // (batch * heads * length)))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        products = q[:, :, first:last].float() @ keys[:, :, :last].float().mT
        yield first, products.mul_(spec.scale)


def count_visible_logits(heads: int, rows: int, keys: int, window: int | None = None) -> int:
    """Count the logits of keys that the last `rows` queries see among `keys` positions, summed over `heads` heads.

    A query sees its own and earlier positions, and with a window only the newest `window` of these.
    """
    seen = range(keys - rows + 1, keys + 1)
    return heads * sum(min(count, window or count) for count in seen)


def split_into_batches(ids: Tensor, max_tokens: int = BATCH_TOKENS) -> Sequence[Tensor]:
    """Split sequences [N, T] into batches [n, T] of at most `max_tokens` tokens; each has at least one sequence."""
    windows: Sequence[Tensor] = ids.split(max(1, max_tokens // ids.shape[1]))
    return windows


def _keys_of_maps(k: Tensor, spec: DiffSpec) -> Tensor:
    """Repeat keys [B, key heads, S, d] so that each query head has one, [B, query heads, S, d]."""
    repeats = [heads // spec.kv_pairs for heads in (spec.pairs, spec.layout.noise_heads)[: spec.maps]]
    maps = zip(spec.layout.split_key_maps(k), repeats, strict=True)
    return torch.cat([keys.repeat_interleave(times, 1) for keys, times in maps], 1)
