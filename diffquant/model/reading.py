"""Inputs of a model: conversion of transformers' arguments to masks, caches and positions, and order of tokens."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.windowed_cache import MixedCache

# An additive mask value up to this hides a key. Callers use the dtype's lowest number or -1e4.
_HIDING = -1e4


def convert_mask(attention_mask: Tensor | None, batch: int, length: int, keys: int) -> Mask:
    """Convert transformers' mask argument for T = `length` new tokens over S = `keys` cached and new ones.

    Args:
        attention_mask: [B, S], 0 at padding; or [B or 1, 1, T, S], a mask that replaces causal order: bool, True where
            a query sees a key, or additive, 0 there and the dtype's lowest number elsewhere. None means causal order
            without padding.

    Raises:
        UsageError: its shape or dtype is different, or an additive mask has values that neither show nor hide a key.
    """
    if attention_mask is None:
        return Mask()
    if not isinstance(attention_mask, Tensor):
        raise UsageError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
    shape = list(attention_mask.shape)
    if shape == [batch, keys]:
        return Mask(None if attention_mask.all() else attention_mask.bool())
    if attention_mask.dim() == 4 and shape[0] in (1, batch) and shape[1:] == [1, length, keys]:
        return Mask(explicit=_visible_keys(attention_mask))
    raise UsageError(
        f"attention_mask must be [{batch}, {keys}] over cached and new tokens, or [{batch}, 1, {length}, {keys}] with "
        f"the keys that each new token sees, the same for all heads; got {shape}"
    )


def _visible_keys(mask: Tensor) -> Tensor:
    """Convert a 4-D mask, bool or additive, to bool: True where a query sees a key."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not mask.is_floating_point() or not (seen | (mask <= _HIDING)).all():
        raise UsageError(
            "a 4-D attention_mask is bool, True where a key is seen, or of floats that are added to logits: 0 where it "
            f"is seen and the dtype's lowest where not; got {mask.dtype} from {mask.min().item()} to "
            f"{mask.max().item()}. Other numbers are a bias, which is not supported"
        )
    return seen


def packed_sequence_mask(position_ids: Tensor) -> Mask | None:
    """Return the mask of sequences packed into one row, which begin where positions restart, or None if not packed.

    Args:
        position_ids: [B, T].
    """
    starts = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    if not starts.any():
        return None
    sequence = starts.cumsum(-1)
    order = torch.ones(2 * position_ids.shape[-1:], dtype=torch.bool, device=position_ids.device).tril()
    return Mask(explicit=((sequence[:, :, None] == sequence[:, None]) & order)[:, None])


# The cache's name in the installed transformers, as an argument of `generate` and as a field of outputs.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def resolve_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """Return the cache that a caller passed under one of transformers' two names for it, or None.

    Raises:
        UsageError: both were passed.
    """
    if past_key_values is not None and cache is not None:
        raise UsageError("got both cache and past_key_values; pass only one")
    return past_key_values if cache is None else cache


def pop_cache(given: MutableMapping[str, Any]) -> Cache | None:
    """Remove `past_key_values` or `cache` from arguments and return its value, or None if neither is given.

    Raises:
        UsageError: both were passed.
    """
    return resolve_cache(given.pop("past_key_values", None), given.pop("cache", None))


def compute_positions(valid: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Return the positions [B or 1, T] of new tokens, not counting padding.

    Args:
        valid: bool [B, S] over cached and new tokens, False at padding, or None if there is no padding.
        past: number of cached tokens.
        length: T, number of new ones.
    """
    if valid is None:
        return torch.arange(past, past + length, device=device)[None]
    return (valid.long().cumsum(1) - 1).clamp_(min=0)[:, past:]


@dataclass(frozen=True)
class Reading:
    """Masks and cache with which a model's layers read new tokens [B, T].

    Attributes:
        whole: mask of layers that see all tokens.
        windowed: mask of windowed layers, over the tokens in their caches and the new ones.
        needed: number of newest tokens that windowed layers keep in their caches afterwards.
        cache: cache to read and extend, or None.
        valid: bool [B, T], False at padding among the new tokens, or None if there is no padding.
    """

    whole: Mask
    windowed: Mask
    needed: int
    cache: MixedCache | None
    valid: Tensor | None = None

    @classmethod
    def of(cls, valid: Tensor | None, length: int, window: int | None, cache: MixedCache | None) -> Self:
        """Create the masks and the cache arguments of a model's layers for T = `length` new tokens.

        Args:
            valid: bool [B, S] over cached and new tokens, False at padding, or None if there is no padding.
            window: number of newest tokens that windowed layers see, or None if there is no window.
            cache: cache of the earlier tokens, or None.
        """
        near = length + (cache.windowed_length if cache is not None else 0)
        windowed = Mask(None if valid is None else valid[:, -near:], window)
        new = None if valid is None else valid[:, -length:]
        return cls(Mask(valid), windowed, windowed.count_needed_keys(near), cache, new)

    def mask(self, window: int | None) -> Mask:
        """Return the mask of windowed layers, or of layers that see all tokens if `window` is None."""
        return self.whole if window is None else self.windowed

    @property
    def valid_counts(self) -> Tensor | None:
        """Number of new tokens per sequence that are not padding, [B], or None if there is no padding."""
        return None if self.valid is None else self.valid.sum(1)

    def move_padding_last(self, x: Tensor) -> Tensor:
        """Reorder each sequence in x [B, T, E] so that padding follows its tokens, as a recurrence needs."""
        return x if self.valid is None else x.take_along_dim(self._order(self.valid), 1)

    def restore_padding(self, x: Tensor) -> Tensor:
        """Undo `move_padding_last`: return x [B, T, E] with tokens and padding in their original order."""
        return x if self.valid is None else x.take_along_dim(self._order(self.valid).argsort(1), 1)

    def zero_steps_at_padding(self, step: Tensor) -> Tensor:
        """Set a recurrence's step sizes [B, T, E], ordered by `move_padding_last`, to 0 at padding."""
        if self.valid_counts is None:
            return step
        places = torch.arange(step.shape[1], device=step.device)
        return step.masked_fill((places >= self.valid_counts[:, None])[..., None], 0.0)

    @staticmethod
    def _order(valid: Tensor) -> Tensor:
        """Return the indices, int64 [B, T, 1], that move padding behind the tokens."""
        return (~valid).sort(dim=1, stable=True).indices[..., None]
