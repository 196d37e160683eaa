"""KV caches of the reference: they round keys and values as the exported quantized cache does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import DynamicCache

from diffquant.checkpoints.ranges import Ranges
from diffquant.onnx.graph.plan import Scales
from diffquant.recipe.numbers.absmax import max_code


def scale_error(cache: "StaticScaleCache", ranges: Ranges) -> float:
    """Return the largest relative difference between a cache's scales and those that calibrated ranges give."""
    errors = [
        (scale.flatten() * max_code(cache.bits) / ranges.tensors[f"layers.{layer}.{target}"].flatten() - 1).abs().max()
        for layer, scales in cache.scales.items()
        for target, scale in zip(("k", "v"), scales, strict=True)
    ]
    return float(torch.stack(errors).max())


def to_model_order(scales: Scales, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Reorder the scales of an export's cache to DiffTransformer's heads and channels.

    Args:
        scales: k_scale and v_scale of a layer.
        orders: result of `exported_cache_channels`.

    Returns:
        Scales [1, key heads, 1, key width] of keys and [1, KV pairs, 1, value width] of values.
    """
    keys, values = (torch.from_numpy(s.flatten())[at][None, :, None] for s, at in zip(scales, orders, strict=True))
    return keys, values


class StaticScaleCache(DynamicCache):
    """A cache that quantizes and dequantizes new keys and values, returns them, and stores none.

    Attributes:
        scales: scales of keys and values, by layer.
        bits: width of the codes.
        largest: largest magnitudes of keys and values so far, by layer; shaped like the scales.
    """

    def __init__(self, scales: Mapping[int, tuple[Tensor, Tensor]], bits: int) -> None:
        super().__init__()
        self.scales = scales
        self.bits = bits
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        states = (key_states, value_states)
        seen = [x.abs().amax((0, 2), keepdim=True) for x in states]
        before = self.largest.get(layer_idx, tuple(torch.zeros_like(x) for x in seen))
        keys, values = (torch.maximum(a, b) for a, b in zip(before, seen, strict=True))
        self.largest[layer_idx] = keys, values
        return self.round_trip(*states, layer_idx)

    def round_trip(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Quantize and dequantize a layer's keys and values."""
        limit = max_code(self.bits)
        keys, values = (
            (x / scale).round().clamp(-limit, limit) * scale
            for x, scale in zip((keys, values), self.scales[layer], strict=True)
        )
        return keys, values

    def has_clipped(self, layer: int) -> bool:
        """Return whether some of a layer's keys or values so far were clipped to the largest code."""
        limit = max_code(self.bits)
        pairs = zip(self.largest[layer], self.scales[layer], strict=True)
        # Half a code of tolerance: a scale may be rounded down in its last digit.
        return any(bool((largest > scale * (limit + 0.5)).any()) for largest, scale in pairs)

    def with_fitted_scales(self) -> "StaticScaleCache":
        """Return a cache of the same bit width whose scales fit the keys and values seen so far."""
        limit = max_code(self.bits)
        scales = {}
        for layer, largest in self.largest.items():
            keys, values = (torch.where(x == 0, 1.0, x / limit) for x in largest)
            scales[layer] = keys, values
        return StaticScaleCache(scales, self.bits)


def read_cache_scales(graph: onnx.ModelProto) -> dict[int, Scales]:
    """Read the static cache scales in an exported graph by layer; empty if the cache is not quantized."""
    tensors = {
        tensor.name: tensor for tensor in graph.graph.initializer if tensor.name.endswith(("k_scale", "v_scale"))
    }
    layers = {int(name.split(".")[1]) for name in tensors}
    return {
        layer: (
            numpy_helper.to_array(tensors[f"layers.{layer}.k_scale"]),
            numpy_helper.to_array(tensors[f"layers.{layer}.v_scale"]),
        )
        for layer in sorted(layers)
    }


@dataclass(frozen=True)
class Past:
    """Cached keys and values of P tokens before a sequence, the same in all layers.

    Attributes:
        keys: [1, key heads, P, key width] in DiffTransformer's order; if the cache is quantized, codes as floats.
        values: [1, KV pairs, P, value width] in DiffTransformer's order; if the cache is quantized, codes as floats.
        states: recurrent states [1, ...] of layers without keys and values, or None if there are no such layers.
    """

    keys: Tensor
    values: Tensor
    states: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_export(
        cls,
        keys: np.ndarray,
        values: np.ndarray,
        orders: tuple[Tensor, Tensor],
        states: tuple[Tensor, Tensor] | None = None,
    ) -> "Past":
        """Convert an export's cached keys and values, which have P tokens.

        Args:
            keys: keys as the export stores them, [1, KV pairs, P, entries].
            values: values as the export stores them, [1, KV pairs, P, entries].
            orders: result of `exported_cache_channels`.
            states: recurrent states, as in the class.
        """
        flat = (torch.from_numpy(_codes(x)[0]).movedim(0, 1).flatten(1) for x in (keys, values))
        of_model = [rows[:, order].movedim(0, 1)[None].float() for rows, order in zip(flat, orders, strict=True)]
        return cls(of_model[0], of_model[1], states)

    @property
    def length(self) -> int:
        """Number P of cached tokens."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class CallPattern:
    """How a model reads a sequence: split into calls, and behind a past.

    Attributes:
        calls: number of tokens in each call; empty for one call. The split changes logits that are quantized with
            dynamic scales.
        past: cached keys and values before the sequence, or None if there are none.
    """

    calls: tuple[int, ...] = ()
    past: Past | None = None


WHOLE = CallPattern()


class GrowingCache(DynamicCache):
    """A cache of one layer, which grows with each call.

    It is for one batch, or for several sequences packed one after another along the token axis.

    Attributes:
        static: cache that rounds keys and values, or None to leave them unchanged.
        past: keys and values before the first call, or None if there are none.
        held: rounded keys and values of each packed sequence, or of the batch; () before the first call.
        lengths: number of each packed sequence's tokens in a call; empty for a batch.
    """

    def __init__(
        self,
        static: StaticScaleCache | None,
        past: Past | None = None,
        held: Sequence[tuple[Tensor, ...]] = ((),),
        lengths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.static = static
        self.past = past
        self.held = list(held)
        self.lengths = list(lengths)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        new = (key_states, value_states)
        if self.static is not None:
            new = self.static.update(*new, layer_idx)
        added = zip(*(x.split(self.lengths or x.shape[2], 2) for x in new), strict=True)
        # All sequences of a batch have the same past.
        before = [x.expand(len(key_states), -1, -1, -1) for x in self._before(layer_idx)]
        self.held = [
            tuple(torch.cat(parts, 2) for parts in zip(rows or before, own, strict=True)) if rows or before else own
            for rows, own in zip(self.held, added, strict=True)
        ]
        return self.held[0] if len(self.held) == 1 else tuple(torch.cat(x, 2) for x in zip(*self.held, strict=True))

    def _before(self, layer: int) -> tuple[Tensor, ...]:
        if self.past is None:
            return ()
        rows = (self.past.keys, self.past.values)
        if self.static is None:
            return rows
        return tuple(x * scale for x, scale in zip(rows, self.static.scales[layer], strict=True))


def _codes(stored: np.ndarray) -> np.ndarray:
    """Return a cache's entries; bytes of two 4-bit codes are unpacked to int8, the lower half first."""
    if stored.dtype != np.uint8:
        return stored
    return np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1).astype(np.int8) - 8
