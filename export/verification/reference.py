"""The reference of an exported model: DiffTransformer with the export's own codes and scales, a stage at a time.

A stage is the embedding, a layer, or the head behind the final norm. A stage's input can be what the runtime made
of the stages before, so that an error is seen where it is made, and not through all that follows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.export.graph.cache_scales import Scales, state_order
from diffquant.export.graph.linears import container_bits, int8_block
from diffquant.export.graph.plan import EMBEDDING, HEAD, ExportPlan
from diffquant.export.options import ExportOptions
from diffquant.export.verification.activations import Rounding, round_by_block, runtime_rounding
from diffquant.family.mask import Mask
from diffquant.loading import load
from diffquant.model.modeling import DiffLayer, DiffTransformer
from diffquant.recipe import Recipe
from diffquant.source.source import Source

# Unit roundoff of float32, in which products are summed whatever the type of what they multiply.
_SUM = 2.0**-24
# A disturbance by which some of a few hundred positions have a code that falls to its neighbour.
FLIPPING = 2.0**-18


class Reference:
    """The torch twin of an exported folder, in float32.

    Attributes:
        model: model with the exported weights' values.
        layers: number of layers.
        rounds: whether some products round their activations to int8.
        knows_rounding: whether ONNX Runtime rounds activations by a rule that torch follows here.
    """

    def __init__(self, source: Source, options: ExportOptions, scales: Mapping[int, Scales]) -> None:
        self._plan = ExportPlan(source, options)
        orders = state_order(source)
        by_layer = {layer: _to_model_order(layer_scales, orders) for layer, layer_scales in scales.items()}
        self._cache = StaticCache(by_layer, options.kv_bits) if scales else None
        self.model: DiffTransformer = load(source, Recipe(logits=options.logits), torch.float32, device="cpu")
        self.layers = self.model.config.num_hidden_layers
        self.rounds = False
        self.knows_rounding = True
        self._is_rounding = False
        self._noise: float | None = None
        self._random = torch.Generator()
        self._take_weights()
        self._hook_products()
        self._hook_results()

    @property
    def stages(self) -> list[str]:
        """Names of the stages in order."""
        return ["the embedding", *(f"layer {layer}" for layer in range(self.layers)), "the head"]

    @contextmanager
    def arithmetic(self, *, rounds: bool = False, noise: float | None = None) -> Iterator[None]:
        """Compute otherwise than in plain float32.

        Args:
            rounds: round activations as ONNX Runtime's products do that multiply int8.
            noise: disturb every result by as much as the export's type rounds it, and by this share of it at least, the
                same way each time.
        """
        self._is_rounding, self._noise = rounds, noise
        self._random.manual_seed(0)
        try:
            yield
        finally:
            self._is_rounding, self._noise = False, None

    @contextmanager
    def cache_of(self, cache: "StaticCache | None") -> Iterator[None]:
        """Round keys and values as another cache does, or not at all."""
        before, self._cache = self._cache, cache
        try:
            yield
        finally:
            self._cache = before

    @torch.no_grad()
    def stage(self, number: int, x: Tensor) -> Tensor:
        """A stage's output [1, T, D or V] of the output of the stage before, or of token ids [1, T]."""
        model = self.model.model
        if number == 0:
            embedded: Tensor = model.embed_tokens(x)
            return embedded
        if number > self.layers:
            logits: Tensor = self.model.lm_head(model.norm(x))
            return logits
        rotary = model.rotary_emb(x, position_ids=torch.arange(x.shape[1])[None])
        layer = cast(DiffLayer, model.layers[number - 1])
        out: Tensor = layer(x, rotary, Mask(None), self._cache)
        return out

    def run(self, ids: np.ndarray) -> Tensor:
        """Logits [1, T, V] of token ids [1, T]: all stages."""
        x = torch.from_numpy(ids)
        for number in range(len(self.stages)):
            x = self.stage(number, x)
        return x

    @property
    def cache(self) -> "StaticCache | None":
        """Quantized cache that keys and values go through; None for one in the activations' type."""
        return self._cache

    def _take_weights(self) -> None:
        """Replace weights by what the export stores: codes · scale multiplied in float32, or values in its type."""
        parameters = dict(self.model.named_parameters())
        dtype = self._plan.options.torch_dtype
        for name, matrix in self._plan.matrices.items():
            if matrix.scheme.quantizes:
                in_model_order = replace(matrix, order=self._plan.adapter.row_order(name))
                parameters[name].data = in_model_order.dequantized(0, matrix.shape[0], dtype)
            else:
                parameters[name].data = parameters[name].data.to(dtype).float()
        self.model.tie_weights()

    def _hook_products(self) -> None:
        """Have every product with codes round its activations where that is asked for."""
        is_tied = self.model.config.tie_word_embeddings
        for name, module in self.model.named_modules():
            matrix = self._plan.matrices.get(EMBEDDING if is_tied and f"{name}.weight" == HEAD else f"{name}.weight")
            block = None if matrix is None else int8_block(matrix, self._plan.options)
            if matrix is None or block is None or not isinstance(module, nn.Linear):
                continue
            rounding = runtime_rounding(container_bits(matrix.scheme), block)
            self.rounds = True
            self.knows_rounding &= rounding is not None
            module.register_forward_pre_hook(self._rounding_hook(rounding or round_by_block, block))

    def _rounding_hook(self, rounding: Rounding, block: int) -> Any:
        return lambda _module, inputs: (rounding(inputs[0], block),) if self._is_rounding else None

    def _hook_results(self) -> None:
        """Have every result disturbed by its rounding error where that is asked for."""
        stored = _SUM if self._plan.options.dtype == "float32" else 2.0**-11
        for module in self.model.modules():
            if isinstance(module, nn.Linear | LlamaRMSNorm):
                # Errors of a sum of K terms add up like a random walk (Higham and Mary, 2019).
                width = module.weight.shape[-1]
                module.register_forward_hook(self._disturbing_hook(max(stored, _SUM * width**0.5)))
            elif isinstance(module, nn.Embedding | DiffLayer):
                module.register_forward_hook(self._disturbing_hook(stored))

    def _disturbing_hook(self, size: float) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
            if self._noise is None:
                return None
            return output * (1 + max(size, self._noise) * torch.randn(output.shape, generator=self._random))

        return hook


def _to_model_order(scales: Scales, orders: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
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
        limit = 2 ** (self.bits - 1)
        states = (key_states, value_states)
        seen = [x.abs().amax(2, keepdim=True) for x in states]
        before = self.largest.get(layer_idx, tuple(torch.zeros_like(x) for x in seen))
        keys, values = (torch.maximum(a, b) for a, b in zip(before, seen, strict=True))
        self.largest[layer_idx] = keys, values
        return tuple(
            (x / scale).round().clamp(-limit, limit - 1) * scale
            for x, scale in zip(states, self.scales[layer_idx], strict=True)
        )

    def fitted(self) -> "StaticCache":
        """A cache of the same width whose scales fit what this one was given."""
        limit = 2 ** (self.bits - 1) - 1
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
