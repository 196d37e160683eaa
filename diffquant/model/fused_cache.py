"""A KV cache whose attention kernels read the stored codes: the results of `PackedCache`, but faster.

A few new tokens are appended and attended to in two operations, K and V never expanded. More of them (a
prompt) are stored, and attention gets K and V as they read back. Also for 16-bit recipes: storage is
allocated ahead, so a new token copies nothing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.family.heads import each_pairs_noise
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.family.spec import DiffSpec
from diffquant.kernels.arguments import HALF_TYPES
from diffquant.kernels.cache.kv_store import LATENT_WIDTHS, KVStore, store_refusal
from diffquant.kernels.gpu import capability, device_refusal
from diffquant.model.cache import PackedLayer
from diffquant.recipe import Recipe
from diffquant.support.logs import log_once


class FusedLayer(PackedLayer):
    """One layer of a `FusedCache`."""

    store: KVStore | None

    def __init__(self, recipe: Recipe, capacity: int | None) -> None:
        self.capacity = capacity
        super().__init__(recipe, {})

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store [B, H, T, d] keys and [B, H', T, dv] values; return all of both as they read back."""
        return self.append(key_states, value_states).read()

    def append(self, k: Tensor, v: Tensor) -> KVStore:
        """The layer's store, with [B, H, T, d] keys and [B, H', T, dv] values added; it grows if need be.

        Raises:
            UsageError: the given capacity does not suffice.
        """
        from diffquant.kernels.cache.append import append

        tokens = k.shape[2]
        if self.store is None:
            capability(k.device)
            self.store = KVStore(self.recipe, k, v, self.capacity or tokens + 1)
            self.lazy_initialization(k, v)
        needed = self.store.length + tokens
        if needed > (self.capacity or needed):
            raise UsageError(f"the cache was made for {self.capacity} tokens and would hold {needed}; give it more")
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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; the count is negative, as transformers passes it.

        Raises:
            UsageError: the count is positive, or would split a packed block whose tokens share scales.
        """
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}")
        if self.store:
            self.store.crop(-tokens_to_remove)

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.store:
            self.store.replace_tensors(change)


class FusedCache(Cache):
    """KV cache with the recipe's `k`, `v` and `residual` for CUDA devices, for `generate(past_key_values=...)`."""

    def __init__(self, recipe: Recipe, layers: int, capacity: int | None = None) -> None:
        """A cache for `capacity` tokens, or one that grows."""
        super().__init__(layers=[FusedLayer(recipe.at_layer(layer), capacity) for layer in range(layers)])
        self.recipe = recipe

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, including room for future tokens."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def stamps(self) -> tuple[int, ...] | None:
        """Numbers that change whenever a storage moves, or None if a layer has no storage yet."""
        stores = [layer.store for layer in self.layers]
        return None if None in stores else tuple(store.stamp for store in stores)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit without growing."""
        return min((layer.store.capacity if layer.store else 0 for layer in self.layers), default=0)

    def count(self, tokens: int) -> None:
        """Set the host's count of stored tokens, since replays of a CUDA graph advance only the device's."""
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
        """Store new tokens and attend to all, without dequantizing the stored ones.

        Args:
            q: one [B, h, T, d] a map; the second [B, n, T, d] where pairs share noise heads.
            k: [B, H, T, d] new keys, all first maps before all second maps.
            v: [B, h_kv, T, dv] new values.
            lam, scale, mask, post: as `AttentionCall` has them.

        Returns:
            [B, h, T, dv], or None, with nothing stored, where decoding is not for these tokens: too many of
            them (a prompt), or a mask with holes.
        """
        from diffquant.kernels.cache.decode import MAX_QUERIES, decode

        if q[0].shape[2] > MAX_QUERIES or mask.seen is not None or (mask.keys is not None and mask.ranges is None):
            return None
        if q[-1].shape[1] % v.shape[1]:
            # The kernel takes whole noise heads for each KV head.
            q = [each_pairs_noise(x, q[0].shape[1]) for x in q]
        return decode(q, self.layers[layer].append(k, v), lam, scale=scale, mask=mask, post=post)


def fused_cache_refusal(recipe: Recipe, spec: DiffSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a model with this attention cannot decode through a `FusedCache`, or None if it can."""
    if dtype not in HALF_TYPES:
        return f"the decode kernel takes float16 and bfloat16, not {dtype}"
    if spec.lam == "two-gates":
        return "the signal map has a gate of its own, which the decode kernel does not compute"
    if reason := device_refusal(device):
        return reason
    layer_recipes = (replace(recipe, k=k, v=v) for k in recipe.schemes_of("k") for v in recipe.schemes_of("v"))
    refusals = (store_refusal(layer, spec.head_dim, spec.value_dim, dtype) for layer in layer_recipes)
    return next((reason for reason in refusals if reason), None)


def latent_layer_refusal(
    recipe: Recipe, turned: int, latent: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The reason why no kernel decodes from a `FusedLayer` of so many turned channels and latents, or None."""
    if dtype not in HALF_TYPES:
        return f"the decode kernel takes float16 and bfloat16, not {dtype}"
    return device_refusal(device) or store_refusal(recipe, turned, latent, dtype, LATENT_WIDTHS)


def warn_of_slow_decoding(reason: str) -> None:
    """Log once per reason that decoding does not use its kernel."""
    message = "the decode kernel is not used, which makes generation much slower: %s"
    log_once(__name__, logging.WARNING, message, reason)
