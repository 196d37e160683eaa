"""A KV cache whose attention kernels read the packed codes: the results of `PackedCache`, but faster.

For a few new tokens, one operation appends them and one computes attention, without dequantizing the stored K and V to
memory. For a prompt, new tokens are appended, and attention uses the dequantized K and V. The cache also serves 16-bit
recipes: memory is allocated ahead, so appending a token copies no earlier ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from diffquant.family.heads import repeat_noise_heads
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.family.spec import DiffSpec
from diffquant.kernels.arguments import HALF_TYPES, MAX_QUERIES
from diffquant.kernels.cache.kv_store import LATENT_WIDTHS, KVStore, store_refusal
from diffquant.kernels.gpu import compute_capability, device_refusal
from diffquant.model.cache import PackedLayer
from diffquant.recipe import Recipe
from diffquant.support.devices import log_once

# Most tokens to allocate memory for ahead, unless twice the prompt's length is more.
_MOST_EXPECTED = 4096


def _no_store(_fits: Callable[[KVStore], bool]) -> KVStore | None:
    return None


class FusedLayer(PackedLayer):
    """One layer of a `FusedCache`."""

    store: KVStore | None

    def __init__(self, recipe: Recipe) -> None:
        self.expected, self.reuse = 0, _no_store
        super().__init__(recipe, {})

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys [B, H, T, d] and values [B, H', T, dv] of new tokens; return those of all tokens, dequantized."""
        return self.append(key_states, value_states).read()

    def append(self, k: Tensor, v: Tensor) -> KVStore:
        """Append keys [B, H, T, d] and values [B, H', T, dv] to the layer's store and return it; grow it if needed."""
        from diffquant.kernels.cache.append import append

        tokens = k.shape[2]
        if self.store is None:
            compute_capability(k.device)
            room = max(tokens + 1, min(self.expected, max(2 * tokens, _MOST_EXPECTED)))
            self.store = self.reuse(lambda store: store.has_same_layout(self.recipe, k, v, room))
            if self.store is None:
                self.store = KVStore(self.recipe, k, v, room)
            self.lazy_initialization(k, v)
        needed = self.store.length + tokens
        if needed > self.store.capacity:
            self.store.grow(needed + needed // 2)
        append(self.store, k, v)
        return self.store

    @property
    def nbytes(self) -> int:
        return self.store.nbytes if self.store else 0

    def get_seq_length(self) -> int:
        return self.store.length if self.store else 0

    def reset(self) -> None:
        self.store = None
        self.is_initialized = False

    def _forget_newest(self, tokens: int) -> None:
        """Forget tokens.

        Raises:
            UsageError: a packed block whose tokens share scales would be split.
        """
        if self.store:
            self.store.crop(tokens)

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.store:
            self.store.replace_tensors(change)


class FusedCache(Cache):
    """KV cache with the recipe's `k`, `v` and `residual` for CUDA devices, for `generate(past_key_values=...)`."""

    def __init__(self, recipe: Recipe, layers: int) -> None:
        super().__init__(layers=[FusedLayer(recipe.at_layer(layer)) for layer in range(layers)])
        self.recipe = recipe

    @property
    def nbytes(self) -> int:
        """Allocated bytes, including memory for future tokens."""
        return sum(layer.nbytes for layer in self.layers)

    def plan_memory_for(self, tokens: int, reuse: Callable[[int, Callable[[KVStore], bool]], KVStore | None]) -> None:
        """Prepare the memory that layers get with their first tokens.

        Args:
            tokens: number of tokens to allocate memory for.
            reuse: function of a layer's index and a predicate of stores that returns an empty store from an earlier
                call for which the predicate is true, or None.
        """
        for number, layer in enumerate(self.layers):
            layer.expected, layer.reuse = tokens, partial(reuse, number)

    @property
    def storage_versions(self) -> tuple[int, ...] | None:
        """One number per layer, which changes whenever the layer's memory moves.

        The result is None as long as a layer has no memory.
        """
        stores = [layer.store for layer in self.layers]
        return None if None in stores else tuple(store.storage_version for store in stores)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the allocated memory."""
        return min((layer.store.capacity if layer.store else 0 for layer in self.layers), default=0)

    def set_length(self, tokens: int) -> None:
        """Set the number of stored tokens on the host; replays of a CUDA graph update only the number on the device."""
        for layer in self.layers:
            layer.store.length = tokens

    def attend(
        self,
        layer: int,
        q: Sequence[Tensor],
        k: Tensor,
        v: Tensor,
        lam: Tensor | None,
        *,
        scale: float,
        mask: Mask,
        post: PairNorm | None = None,
    ) -> Tensor | None:
        """Store new tokens and compute their attention over all tokens with the decode kernel.

        Args:
            q: queries, [B, h, T, d] per map. If h pairs share n noise heads, those of the second map are [B, n, T, d].
            k: new keys [B, H, T, d], heads of the first map before those of the second.
            v: new values [B, h_kv, T, dv].
            lam, scale, mask, post: as in `AttentionCall`.

        Returns:
            The output [B, h, T, dv]. None, with nothing stored, if the kernel does not support these tokens: there are
            too many (a prompt), or the padding mask has holes.
        """
        from diffquant.kernels.cache.decode import decode

        if (
            q[0].shape[2] > MAX_QUERIES
            or mask.explicit is not None
            or (mask.keys is not None and mask.valid_ranges is None)
        ):
            return None
        if q[-1].shape[1] % v.shape[1]:
            # The kernel needs a whole number of noise heads per KV head.
            q = [repeat_noise_heads(x, q[0].shape[1]) for x in q]
        return decode(q, self.layers[layer].append(k, v), lam, scale=scale, mask=mask, post=post)


def fused_cache_refusal(recipe: Recipe, spec: DiffSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a model with this recipe and attention cannot use a `FusedCache`, or None if it can."""
    if dtype not in HALF_TYPES:
        return f"the decode kernel supports float16 and bfloat16, not {dtype}"
    if spec.lam == "two-gates":
        return "the signal map has a separate gate, which the decode kernel does not support"
    if reason := device_refusal(device):
        return reason
    layer_recipes = (replace(recipe, k=k, v=v) for k in recipe.schemes_of("k") for v in recipe.schemes_of("v"))
    refusals = (store_refusal(layer, spec.head_dim, spec.value_dim, dtype) for layer in layer_recipes)
    return next((reason for reason in refusals if reason), None)


def latent_layer_refusal(
    recipe: Recipe, rotated_width: int, latent: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why no kernel decodes from a `FusedLayer` with latents, or None.

    A token has `rotated_width` rotated key channels and a latent of `latent` channels.
    """
    if dtype not in HALF_TYPES:
        return f"the decode kernel supports float16 and bfloat16, not {dtype}"
    return device_refusal(device) or store_refusal(recipe, rotated_width, latent, dtype, LATENT_WIDTHS)


def warn_of_slow_decoding(reason: str) -> None:
    """Log once per reason that the decode kernel is not used."""
    message = "the decode kernel is not used, which makes generation much slower: %s"
    log_once(__name__, logging.WARNING, message, reason)
