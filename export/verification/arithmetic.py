"""A model with an export's weights, whose arithmetic can be changed: rounded activations, and noise in every result."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.checkpoints.source import Source
from diffquant.model.causal import CausalModel
from diffquant.model.decoder import DecoderLayer
from diffquant.onnx.graph.matrix import container_bits, int8_block_size
from diffquant.onnx.graph.plan import EMBEDDING, HEAD, ExportPlan
from diffquant.onnx.options import ExportOptions
from diffquant.onnx.verification.rounding import (
    NoiseSource,
    Rounding,
    find_activation_rounding,
    make_cached_rounding,
    round_by_block,
)
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe

# Unit roundoff of float32, the accumulation type of every matmul, whatever the type of its inputs.
SUM = 2.0**-24
# Relative noise with which, of a few hundred positions, some have a value that moves to a neighbouring code.
FLIPPING = 2.0**-18
# The same for quantized logits: they have few levels, and far fewer values lie near a boundary.
FLIPPING_LOGITS = 2.0**-14


class ExportedWeights:
    """A model with the values of an export's weights, in float32.

    Attributes:
        model: the model in torch.
        rounds: whether some of the export's matmuls round their activations to int8.
        flipping: size of relative noise that moves some quantized values, logits included, to a neighbouring code.
        knows_rounding: whether this class can round activations exactly as ONNX Runtime does.
    """

    def __init__(self, source: Source, options: ExportOptions, exact_bits: Collection[int]) -> None:
        """Load the checkpoint with the export's weights.

        Args:
            exact_bits: widths of the weight codes that the graph multiplies with float32 activations.
        """
        self._plan = ExportPlan(source, options)
        self.model: CausalModel = load(source, Recipe(logits=options.logits), torch.float32, device="cpu")
        self.rounds, self.knows_rounding = False, True
        self.flipping = FLIPPING_LOGITS if options.logits.quantizes else FLIPPING
        self._is_rounding = False
        self._noise: float | None = None
        self._disturbance = NoiseSource()
        self._rounded = make_cached_rounding()
        self._take_weights()
        self._hook_products(exact_bits)
        self._hook_results()

    def change_arithmetic(self, *, rounds: bool = False, noise: float | None = None) -> AbstractContextManager[None]:
        """Inside the context, round activations, add noise to results, or both.

        Args:
            rounds: round activations as ONNX Runtime's int8 matmuls do.
            noise: smallest relative size of the noise, or None to add no noise. The noise is at least as large as the
                rounding error of the export's type. It is the same each time.
        """
        self._disturbance.restart()
        return self._set(_is_rounding=rounds, _noise=noise)

    @contextmanager
    def _set(self, **settings: Any) -> Iterator[None]:
        """Change attributes inside the context."""
        before = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        try:
            yield
        finally:
            vars(self).update(before)

    def _take_weights(self) -> None:
        """Replace weights by the export's values: codes · scale in float32, or values rounded to its type."""
        parameters = dict(self.model.named_parameters())
        dtype = self._plan.options.torch_dtype
        for name, matrix in self._plan.matrices.items():
            parameter, rows = parameters[name], matrix.shape[0]
            # `load` unpacked these in float32, which are already a float32 export's values.
            if matrix.stored.quantizes and dtype is torch.float32:
                continue
            if matrix.scheme.quantizes:
                in_model_order = replace(matrix, order=self._plan.source.adapter.row_order(name))
                scale_dtype = dtype if matrix.has_codes else torch.float32
                parameter.data = in_model_order.dequantize(0, rows, scale_dtype).view(parameter.shape)
            if not matrix.has_codes:
                parameter.data = parameter.data.to(dtype).float()
        self.model.tie_weights()

    def _hook_products(self, exact_bits: Collection[int]) -> None:
        """Register hooks that round activations of int8 matmuls inside `change_arithmetic(rounds=True)`."""
        is_tied = self.model.config.tie_word_embeddings
        for name, module in self.model.named_modules():
            matrix = self._plan.matrices.get(EMBEDDING if is_tied and f"{name}.weight" == HEAD else f"{name}.weight")
            block = None if matrix is None else int8_block_size(matrix, self._plan.options)
            if matrix is None or block is None or not isinstance(module, nn.Linear):
                continue
            bits = container_bits(matrix.scheme)
            if bits in exact_bits:
                continue
            rounding = find_activation_rounding(bits, block)
            self.rounds = True
            self.knows_rounding &= rounding is not None
            module.register_forward_pre_hook(partial(self._round_input, rounding or round_by_block, block))

    def _round_input(
        self, rounding: Rounding, block: int, _module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor] | None:
        return (self._rounded(inputs[0], rounding, block),) if self._is_rounding else None

    def _hook_results(self) -> None:
        """Register hooks that add noise to every module's output while `change_arithmetic(noise=...)` is active."""
        stored = SUM if self._plan.options.dtype == "float32" else 2.0**-11
        for module in self.model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm | LlamaRMSNorm):
                # Errors of a sum of K terms add up like a random walk (Higham and Mary, 2019).
                width = module.weight.shape[-1]
                module.register_forward_hook(partial(self._disturb_output, max(stored, SUM * width**0.5)))
            elif isinstance(module, nn.Embedding | DecoderLayer):
                module.register_forward_hook(partial(self._disturb_output, stored))

    def _disturb_output(self, size: float, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return None if self._noise is None else self._disturb(output, max(size, self._noise))

    def _disturb(self, output: Any, size: float) -> Any:
        """Multiply a module's output by random factors near 1."""
        return self._disturbance.add_noise(output, size)
