"""The reference of an exported model: DiffTransformer with the export's own codes and scales."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import DynamicCache

from diffquant.export.graph.cache_scales import Scales, state_order
from diffquant.export.graph.plan import ExportPlan
from diffquant.export.options import ExportOptions
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.source.source import Source


class Reference:
    """The torch twin of an exported folder, in float32.

    Attributes:
        model: model with the exported weights' values.
    """

    def __init__(self, source: Source, options: ExportOptions, scales: Mapping[int, Scales]) -> None:
        self._plan = ExportPlan(source, options)
        self._bits = options.kv_bits
        orders = state_order(source)
        self._scales = {layer: _to_model_order(layer_scales, orders) for layer, layer_scales in scales.items()}
        self.model: DiffTransformer = load(source, Recipe(logits=options.logits), torch.float32)
        self._take_codes()

    @torch.no_grad()
    def run(self, ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [B, T, V] of token ids [B, T] without padding, and every layer's output [B, T, D]."""
        outputs: list[np.ndarray] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _args, output: outputs.append(output.numpy()))
            for layer in self.model.model.layers
        ]
        try:
            cache = _StaticCache(self._scales, self._bits) if self._scales else None
            logits = self.model(torch.from_numpy(ids), past_key_values=cache).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits.numpy(), outputs

    def _take_codes(self) -> None:
        """Replace quantized weights by codes · scale in float32, as the runtime multiplies them."""
        parameters = dict(self.model.named_parameters())
        for name, matrix in self._plan.matrices.items():
            if matrix.scheme.quantizes:
                in_model_order = replace(matrix, order=self._plan.adapter.row_order(name))
                parameters[name].data = in_model_order.dequantized(0, matrix.shape[0])
        self.model.tie_weights()


def _to_model_order(scales: Scales, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """k_scale as [1, key heads, 1, d] and v_scale as [1, h_kv, 1, dv] of DiffTransformer."""
    keys, values = (torch.from_numpy(s.flatten())[at][None, :, None] for s, at in zip(scales, orders, strict=True))
    return keys, values


class _StaticCache(DynamicCache):
    """A cache that returns keys and values as their codes are read back."""

    def __init__(self, scales: Mapping[int, tuple[Tensor, Tensor]], bits: int) -> None:
        super().__init__()
        self.scales = scales
        self.limit = 2 ** (bits - 1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = (
            (states / scale).round().clamp(-self.limit, self.limit - 1) * scale
            for states, scale in zip((key_states, value_states), self.scales[layer_idx], strict=True)
        )
        return super().update(k, v, layer_idx, *args, **kwargs)


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
