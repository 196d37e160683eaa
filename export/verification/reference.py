"""The reference of an exported model: DiffTransformer with the export's own codes and scales, a stage at a time.

A stage is the embedding, a layer, or the head behind the final norm. A stage's input can be what the runtime made
of the stages before, so that an error is seen where it is made, and not through all that follows.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.evals.prefixes import shares_prefixes
from diffquant.export.graph.cache_scales import Scales, state_order
from diffquant.export.graph.linears import container_bits, int8_block
from diffquant.export.graph.plan import EMBEDDING, HEAD, ExportPlan
from diffquant.export.options import ExportOptions
from diffquant.export.verification.activations import RoundedInputs, Rounding, round_by_block, runtime_rounding
from diffquant.export.verification.caches import GrowingCache, Past, StaticCache, to_model_order
from diffquant.export.verification.disturbance import Disturbance
from diffquant.family.mask import Mask
from diffquant.loading import load
from diffquant.model.causal import CausalModel
from diffquant.model.decoder import DecoderLayer
from diffquant.model.modeling import DiffLayer
from diffquant.recipe import Recipe
from diffquant.source.source import Source

# Unit roundoff of float32, in which products are summed whatever the type of what they multiply.
_SUM = 2.0**-24
# A disturbance by which some of a few hundred positions have a code that falls to its neighbour.
FLIPPING = 2.0**-18
# One by which some logits have, of which there are few levels and far fewer near a boundary.
FLIPPING_LOGITS = 2.0**-14


@dataclass(frozen=True)
class Reading:
    """How a sequence goes through a model; by default whole and from its beginning.

    Attributes:
        calls: number of tokens of each call, in which a scale of the logits lives; none for one call.
        past: rows of every layer's cache before the sequence; None for none.
    """

    calls: tuple[int, ...] = ()
    past: Past | None = None


WHOLE = Reading()


@dataclass(frozen=True)
class _Kept:
    """A stage's output for a whole sequence, kept for routes that give it the same states or their beginning."""

    given: Tensor
    output: Tensor
    cached: tuple[Tensor, ...] = ()


class Reference:
    """The torch twin of an exported folder, in float32.

    Attributes:
        model: model with the exported weights' values.
        layers: number of layers.
        rounds: whether some products round their activations to int8.
        flipping: disturbance by which some codes fall to their neighbours, those of attention logits among them.
        knows_rounding: whether ONNX Runtime rounds activations by a rule that torch follows here.
    """

    def __init__(
        self, source: Source, options: ExportOptions, scales: Mapping[int, Scales], exact_bits: Collection[int] = ()
    ) -> None:
        """Load the checkpoint with the export's weights.

        Args:
            scales: scales of the quantized cache by layer.
            exact_bits: widths of codes whose products the graph computes of float32 activations.
        """
        self._exact_bits = exact_bits
        self._plan = ExportPlan(source, options)
        self._orders = state_order(source)
        by_layer = {layer: to_model_order(layer_scales, self._orders) for layer, layer_scales in scales.items()}
        self._cache = StaticCache(by_layer, options.kv_bits) if scales else None
        self.model: CausalModel = load(source, Recipe(logits=options.logits), torch.float32, device="cpu")
        self.layers = self.model.config.num_hidden_layers
        self.rounds = False
        self.flipping = FLIPPING_LOGITS if options.logits.quantizes else FLIPPING
        self._shares_prefixes = shares_prefixes(Recipe(logits=options.logits))
        self.knows_rounding = True
        self._is_rounding = False
        self._noise: float | None = None
        self._reading = WHOLE
        self._kept: dict[tuple[int, torch.Size], _Kept] = {}
        self._kept_for: tuple[object, ...] = ()
        self._disturbance = Disturbance()
        self._rounded_inputs = RoundedInputs()
        self._take_weights()
        self._hook_products()
        self._hook_results()

    @property
    def width(self) -> int:
        """Width of a query of the graph's attention nodes."""
        return self._plan.spec.head_dim

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
        self._disturbance.restart()
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

    @contextmanager
    def reading(self, reading: Reading) -> Iterator[None]:
        """Read sequences in certain calls, or behind rows of a cache."""
        self._reading = reading
        try:
            yield
        finally:
            self._reading = WHOLE

    @torch.no_grad()
    def stage(self, number: int, x: Tensor, first: int = 0) -> Tensor:
        """Output of a stage from a position on, [B, T - first, D or V].

        A stage remembers the last whole sequences of each length. It computes nothing for states with which one of them
        begins, and where only those before `first` are as they were, nothing before it.

        Args:
            number: number of the stage, in the order of `stages`.
            x: output [B, T, D] of the stage before, or token ids [B, T].
            first: first position that is wanted.
        """
        if self._noise is not None:
            return self._computed(number, x, ())[0][:, first:]
        context = (self._is_rounding, self._cache, self._reading)
        if len(self._kept_for) != len(context) or any(a is not b for a, b in zip(context, self._kept_for, strict=True)):
            self._kept, self._kept_for = {}, context
        key = (number, x.shape[:2])
        kept = self._kept.get(key) or self._beginning_of_another(number, x)
        if kept is not None and torch.equal(kept.given, x):
            return kept.output[:, first:]
        if first and self._reading is WHOLE:
            if not 0 < number <= self.layers:
                return self._computed(number, x[:, first:], ())[0]
            if kept is not None and torch.equal(kept.given[:, :first], x[:, :first]):
                return self._computed(number, x[:, first:], tuple(rows[:, :, :first] for rows in kept.cached))[0]
        output, cached = self._computed(number, x, ())
        if not first:
            # Rows behind a long past would take the memory of a whole context in every layer.
            self._kept[key] = _Kept(x, output, cached if self._reading is WHOLE else ())
        return output[:, first:]

    def _beginning_of_another(self, number: int, x: Tensor) -> _Kept | None:
        """A stage's output for states that begin a sequence it remembers."""
        if not self._shares_prefixes or self._reading is not WHOLE:
            return None
        length = x.shape[1]
        for (of, shape), kept in self._kept.items():
            if of == number and shape[0] == len(x) and shape[1] > length and torch.equal(kept.given[:, :length], x):
                rows = tuple(part[:, :, :length] for part in kept.cached)
                self._kept[number, x.shape[:2]] = beginning = _Kept(x, kept.output[:, :length], rows)
                return beginning
        return None

    def _computed(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A stage's output of states behind keys and values that it cached, and what is cached after it."""
        if number == 0:
            return self._embedded(x), ()
        if number > self.layers:
            return self.model.lm_head(self._final_norm(x)), ()
        return self._layer_output(number - 1, x, cached)

    def _embedded(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.model.model.embed_tokens(ids)
        return rows

    def _final_norm(self, x: Tensor) -> Tensor:
        normed: Tensor = self.model.model.norm(x)
        return normed

    def _layer_output(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A layer's output of states [B, T, D] behind keys and values that it cached, and what is cached after it."""
        layer = cast(DiffLayer, self.model.model.layers[number])
        calls, past = self._reading.calls, self._reading.past
        cache = GrowingCache(self._cache, past, cached)
        first, parts = past.length if past else cached[0].shape[2] if cached else 0, []
        for chunk in x.split(list(calls) or x.shape[1], 1):
            parts.append(layer(chunk, self._rotary(chunk, first), Mask(None), cache))
            first += chunk.shape[1]
        return torch.cat(parts, 1), cache.held

    def rows_of_a_cache(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Any rows [1, h_kv, P, entries] as a cache may hold them."""
        return keys, values

    def past(self, keys: np.ndarray, values: np.ndarray, states: Sequence[np.ndarray] = ()) -> Past:
        """Rows of the exported model's caches [1, h_kv, P, entries] and states [1, ...], as `reading` takes them."""
        of_layer = tuple(torch.from_numpy(state.astype(np.float32)) for state in states)
        return Past.of(keys, values, self._orders, (of_layer[0], of_layer[1]) if of_layer else None)

    def run(self, ids: np.ndarray) -> Tensor:
        """Logits [1, T, V] of token ids [1, T]: all stages."""
        x = torch.from_numpy(ids)
        with torch.no_grad():
            for number in range(len(self.stages)):
                x = self._computed(number, x, ())[0]
        return x

    @property
    def cache(self) -> "StaticCache | None":
        """Quantized cache that keys and values go through; None for one in the activations' type."""
        return self._cache

    def _rotary(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, T, d] of the positions of x [1, T, D], which begin at a first one."""
        rotary = self.model.model.rotary_emb
        cos, sin = rotary(x, position_ids=torch.arange(first, first + x.shape[1])[None])
        if self._noise is None or not first:
            return cos, sin
        # Powers of a base differ between processors in the last digit, and so do far positions' angles.
        angle = torch.arange(first, first + x.shape[1])[:, None] * rotary.inv_freq.repeat(2)
        turn = angle * _SUM * self._disturbance.normals(angle.shape[-1])
        return cos - turn * sin, sin + turn * cos

    def _take_weights(self) -> None:
        """Replace weights by what the export stores: codes · scale multiplied in float32, or values in its type."""
        parameters = dict(self.model.named_parameters())
        dtype = self._plan.options.torch_dtype
        for name, matrix in self._plan.matrices.items():
            parameter, rows = parameters[name], matrix.shape[0]
            if matrix.scheme.quantizes:
                in_model_order = replace(matrix, order=self._plan.adapter.row_order(name))
                scale_dtype = dtype if matrix.has_codes else torch.float32
                parameter.data = in_model_order.dequantized(0, rows, scale_dtype).view(parameter.shape)
            if not matrix.has_codes:
                parameter.data = parameter.data.to(dtype).float()
        self.model.tie_weights()

    def _hook_products(self) -> None:
        """Have every product with codes round its activations where that is asked for."""
        is_tied = self.model.config.tie_word_embeddings
        for name, module in self.model.named_modules():
            matrix = self._plan.matrices.get(EMBEDDING if is_tied and f"{name}.weight" == HEAD else f"{name}.weight")
            block = None if matrix is None else int8_block(matrix, self._plan.options)
            if matrix is None or block is None or not isinstance(module, nn.Linear):
                continue
            bits = container_bits(matrix.scheme)
            if bits in self._exact_bits:
                continue
            rounding = runtime_rounding(bits, block)
            self.rounds = True
            self.knows_rounding &= rounding is not None
            module.register_forward_pre_hook(self._rounding_hook(rounding or round_by_block, block))

    def _rounding_hook(self, rounding: Rounding, block: int) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            return (self._rounded_inputs.of(inputs[0], rounding, block),) if self._is_rounding else None

        return hook

    def _hook_results(self) -> None:
        """Have every result disturbed by its rounding error where that is asked for."""
        stored = _SUM if self._plan.options.dtype == "float32" else 2.0**-11
        for module in self.model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm | LlamaRMSNorm):
                # Errors of a sum of K terms add up like a random walk (Higham and Mary, 2019).
                width = module.weight.shape[-1]
                module.register_forward_hook(self._disturbing_hook(max(stored, _SUM * width**0.5)))
            elif isinstance(module, nn.Embedding | DecoderLayer):
                module.register_forward_hook(self._disturbing_hook(stored))

    def _disturbing_hook(self, size: float) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            return None if self._noise is None else self._with_disturbed(output, max(size, self._noise))

        return hook

    def _with_disturbed(self, output: Any, size: float) -> Any:
        """What a module gave, times random factors about 1."""
        return self._disturbance.of(output, size)
