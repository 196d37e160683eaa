"""Caches of the reference: keys and values as a quantized cache gives them back, before a sequence and within it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import DynamicCache

from diffquant.export.graph.cache_scales import Scales
from diffquant.numbers.absmax import max_code
from diffquant.source.ranges import Ranges


def scale_error(cache: "StaticCache", ranges: Ranges) -> float:
    """Largest relative difference of a cache's scales from those that calibrated ranges give, over all channels."""
    errors = [
        (scale.flatten() * max_code(cache.bits) / ranges.tensors[f"layers.{layer}.{target}"].flatten() - 1).abs().max()
        for layer, scales in cache.scales.items()
        for target, scale in zip(("k", "v"), scales, strict=True)
    ]
    return float(torch.stack(errors).max())


def to_model_order(scales: Scales, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """k_scale as [1, key heads, 1, d] and v_scale as [1, h_kv, 1, dv] of DiffTransformer."""
    keys, values = (torch.from_numpy(s.flatten())[at][None, :, None] for s, at in zip(scales, orders, strict=True))
    return keys, values


class StaticCache(DynamicCache):
    """A cache of whole sequences that gives keys and values back as their codes are read, and keeps none.

    Attributes:
        scales: scales of keys and values by layer.
        bits: width of the codes.
        largest: largest magnitudes of keys and values by layer that it was given, in the scales' shapes.
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
        return self.read_back(*states, layer_idx)

    def read_back(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as their codes are read."""
        limit = max_code(self.bits)
        keys, values = (
            (x / scale).round().clamp(-limit, limit) * scale
            for x, scale in zip((keys, values), self.scales[layer], strict=True)
        )
        return keys, values

    def fitted(self) -> "StaticCache":
        """A cache of the same width whose scales fit what this one was given."""
        limit = max_code(self.bits)
        scales = {}
        for layer, largest in self.largest.items():
            keys, values = (torch.where(x == 0, 1.0, x / limit) for x in largest)
            scales[layer] = keys, values
        return StaticCache(scales, self.bits)


def cache_scales(graph: onnx.ModelProto) -> dict[int, Scales]:
    """Static scales of the cache by layer, as the model holds them; empty for an unquantized cache."""
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
    """Rows of a cache before a sequence, which all layers share.

    Attributes:
        keys: [1, key heads, P, d] in DiffTransformer's order: floats, or codes as floats where the cache is quantized.
        values: [1, h_kv, P, dv], likewise.
        states: those of layers that keep states instead, [1, ...] each; None where no layer does.
    """

    keys: Tensor
    values: Tensor
    states: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        keys: np.ndarray,
        values: np.ndarray,
        orders: tuple[Tensor, Tensor],
        states: tuple[Tensor, Tensor] | None = None,
    ) -> "Past":
        """The rows of an exported model's caches, [1, h_kv, P, entries] as it stores them."""
        flat = (torch.from_numpy(_codes(x)[0]).movedim(0, 1).flatten(1) for x in (keys, values))
        of_model = [rows[:, order].movedim(0, 1)[None].float() for rows, order in zip(flat, orders, strict=True)]
        return cls(of_model[0], of_model[1], states)

    @property
    def length(self) -> int:
        """Number P of rows."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self.keys.nbytes + self.values.nbytes


class GrowingCache(DynamicCache):
    """A cache of one layer that is extended call by call.

    Attributes:
        static: what rounds keys and values; None if they stay as they are.
        past: rows before the first call; None for none.
        held: keys and values as they are read, those of all calls so far.
    """

    def __init__(self, static: StaticCache | None, past: Past | None, held: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.static = static
        self.past = past
        self.held = held

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        new = (key_states, value_states)
        if self.static is not None:
            new = self.static.update(*new, layer_idx)
        # Sequences of one batch are read behind the same rows.
        held = self.held or tuple(rows.expand(len(key_states), -1, -1, -1) for rows in self._before(layer_idx))
        self.held = tuple(torch.cat(parts, 2) for parts in zip(held, new, strict=True)) if held else new
        return self.held

    def _before(self, layer: int) -> tuple[Tensor, ...]:
        if self.past is None:
            return ()
        rows = (self.past.keys, self.past.values)
        if self.static is None:
            return rows
        return tuple(x * scale for x, scale in zip(rows, self.static.scales[layer], strict=True))


def _codes(stored: np.ndarray) -> np.ndarray:
    """A cache's entries, and for those of two 4-bit codes the codes, of which the lower half of a byte comes first."""
    if stored.dtype != np.uint8:
        return stored
    return np.stack([stored & 15, stored >> 4], -1).reshape(*stored.shape[:-1], -1).astype(np.int8) - 8
