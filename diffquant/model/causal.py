"""The base of every model that runs: a decoder under a recipe, its head, its caches and its reports."""

import inspect
import os
from abc import abstractmethod
from collections.abc import Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from diffquant.attention import LogitMeter, check_backend
from diffquant.errors import NotFiredError, UsageError
from diffquant.family.lam import LAMBDA_VECTORS
from diffquant.family.mask import Mask
from diffquant.model.architecture import Architecture
from diffquant.model.attention import PairAttention
from diffquant.model.attention_mask import packed_mask, read_mask
from diffquant.model.blocks import Blocks
from diffquant.model.config import ArchitectureConfig
from diffquant.model.finite import FiniteLogits
from diffquant.model.generation_modes import BACKEND_OF, check_cache, check_generation, dependence_on_steps
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.model.walk import Walk
from diffquant.numbers.rotation import rotation
from diffquant.recipe import LAYER_TARGETS, Recipe
from diffquant.scheme import Scheme
from diffquant.support.files import write_atomically
from diffquant.support.spelling import spelled

_LAMBDA_STD = 0.1


class CausalPreTrainedModel(PreTrainedModel):
    """A model with transformers' interface, and the initialization of λ."""

    base_model_prefix = "model"
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PairAttention) and module.spec.lam == "exp":
            for name in LAMBDA_VECTORS:
                nn.init.normal_(getattr(module, name), 0.0, _LAMBDA_STD)


class DecoderLayer(nn.Module):
    """A layer that is composed of its architecture's blocks."""

    def __init__(self, blocks: Blocks, layer: int) -> None:
        super().__init__()
        self.layer = layer
        for name, block in blocks.items():
            self.add_module(name, block.new_module())


class Decoder(CausalPreTrainedModel):
    """A decoder without its head: embedding, layers, final norm, and the recipe of its cache and logits."""

    layer_class: ClassVar[type[DecoderLayer]]
    config: ArchitectureConfig
    architecture: Architecture

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        self.architecture = config.architecture
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        layers = enumerate(self.architecture.layers)
        self.layers = nn.ModuleList(self.layer_class(blocks, layer) for layer, blocks in layers)
        self._no_split_modules = [self.layer_class.__name__]
        name, norm = self.architecture.final_norm
        self.add_module(name, norm.new_module())
        self.recipe = Recipe()
        self.ranges: Mapping[str, Tensor] = {}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        graphed_steps: GraphedSteps | None = None,
        **kwargs: Any,  # noqa: ARG002  transformers passes every model more than it may need
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D] after the final norm.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S] over cached and new tokens, 0 where padding; or [B or 1, 1, T, S], which keys each
                query sees, as `read_mask` takes it. Not needed without padding.
            position_ids: [B, T]; counted over what is not padding by default. Where they start again, without cache
                and mask, sequences are packed into one row and do not see each other.
            past_key_values: cache to read and extend.
            inputs_embeds: embeddings [B, T, D] in place of `input_ids`.
            use_cache: whether to return a cache if none was passed.
            output_hidden_states: whether to return the embeddings and each layer's output too, the last one normed;
                the configuration's choice by default.
            output_attentions: refused where true, here or in the configuration.
            graphed_steps: graphs to decode with if possible.
            kwargs: other arguments, none of which changes the result.

        Raises:
            UsageError: inputs contradict each other, a cache does not keep what the recipe says, or attention maps are
                asked for, which are never stored.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise UsageError("output_attentions is not supported: attention maps are not kept")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("pass either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None:
            check_cache(past_key_values, self.recipe, self.has_quantized_cache)
        elif use_cache:
            past_key_values = self.new_cache()
        # Attention reads K and V as a quantized cache stores them, also where the caller keeps none.
        cache = self.new_cache() if past_key_values is None and self.has_quantized_cache else past_key_values
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if graphed_steps is not None and past_key_values is not None and not output_hidden_states:
            replayed = self.run_graphed(graphed_steps, x, attention_mask, position_ids, past_key_values)
            if replayed is not None:
                return BaseModelOutputWithPast(last_hidden_state=replayed, past_key_values=past_key_values)
        mask = read_mask(attention_mask, len(x), x.shape[1], past + x.shape[1])
        if position_ids is not None and attention_mask is None and past_key_values is None:
            mask = packed_mask(position_ids) or mask
        states: list[Tensor] | None = [] if output_hidden_states else None
        x = self.run_layers(x, mask, past, position_ids, cache, states)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=None if states is None else (*states, x),
        )

    @abstractmethod
    def run_layers(
        self,
        x: Tensor,
        mask: Mask,
        past: int,
        position_ids: Tensor | None,
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm, for embedded tokens.

        Args:
            x: [B, T, D].
            mask: mask over cached and new tokens.
            past: number of cached tokens.
            position_ids: [B, T]; counted over what is valid by default.
            cache: cache to read and extend; None to keep nothing.
            states: list that each layer's input is added to; None to keep none.
        """

    def run_graphed(
        self,
        graphs: GraphedSteps,  # noqa: ARG002
        x: Tensor,  # noqa: ARG002
        attention_mask: Tensor | None,  # noqa: ARG002
        position_ids: Tensor | None,  # noqa: ARG002
        cache: Cache,  # noqa: ARG002
    ) -> Tensor | None:
        """Hidden states [B, T, D] of embedded tokens from a CUDA graph; does nothing and returns None if there is none.

        Other arguments: as `forward` has them.
        """
        return None

    def new_graphs(self) -> GraphedSteps | None:
        """Graphs for one call of `generate`, or None if steps cannot be graphed; on CUDA the reason is logged."""
        return None

    @property
    def has_quantized_cache(self) -> bool:
        return any(scheme.quantizes for target in ("k", "v") for scheme in self.recipe.schemes_of(target))

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  some models look at it
        """Whether `generate` must use `new_cache`.

        Args:
            implementation: kind of cache that the caller asked transformers for, if any.
        """
        return self.has_quantized_cache

    @property
    def crop_refusal(self) -> str | None:
        """The reason why the model's own cache cannot drop tokens again, or None if it can."""
        return None

    def draft_refusal(self) -> str | None:
        """The reason why checking drafts at once changes the generated tokens, or None if it does not."""
        return self.crop_refusal or dependence_on_steps(self.recipe)

    @abstractmethod
    def new_cache(self) -> Cache:
        """An empty cache as the recipe wants it."""


class CausalModel(CausalPreTrainedModel, GenerationMixin):
    """A decoder-only language model with differential (or plain) attention.

    `apply_recipe` switches the simulated precision of logits and KV cache; weights are quantized
    when they are loaded.
    """

    decoder_class: ClassVar[type[Decoder]]
    config: ArchitectureConfig
    model: Decoder
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        graphed_steps: GraphedSteps | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Vocabulary logits [B, T, V]; with `logits_to_keep` n only the last n positions, or those indexed.

        Other arguments: as `Decoder.forward`.
        """
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            graphed_steps=graphed_steps,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, positions])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' `generate`, with the recipe's cache unless one is passed.

        Raises:
            UsageError: what is asked for is not computed, or would give other tokens than greedy search does.
            NonFiniteError: logits overflow; the layer where that begins is named.
        """
        given = inspect.signature(super().generate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        check_generation(self, given)
        makes_cache = self.model.needs_own_cache(given.get("cache_implementation"))
        if makes_cache and given.get("use_cache") is not False and given.get("past_key_values") is None:
            given["past_key_values"] = self.new_cache()
        # An assistant would be handed them too.
        if given.get("assistant_model") is None and (graphs := self.model.new_graphs()) is not None:
            given.setdefault("graphed_steps", graphs)
        # An assistant is handed the guard of the model that it serves.
        guards = [each for each in given.get("logits_processor") or [] if not isinstance(each, FiniteLogits)]
        has_ids = given.get("inputs_embeds") is None
        guards.append(FiniteLogits(self, given.get("attention_mask"), has_ids))
        given["logits_processor"] = LogitsProcessorList(guards)
        return super().generate(**given)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refused, and `generate_batch` with it.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "continuous batching (generate_batch) pages K and V through transformers' attention interface, which this "
            "attention does not go through; use generate with a batch, padded on the left"
        )

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *_: Any, **__: Any) -> None:
        """Compute attention as transformers calls it: "sdpa" is the fastest that can, "eager" whole maps in memory.

        Raises:
            UsageError: it is none of those, or cannot quantize logits where the recipe does.
        """
        name = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if name not in BACKEND_OF:
            raise UsageError(
                f"attn_implementation {name!r} is not computed here; choose {', '.join(BACKEND_OF)}, or a backend of "
                "diffquant's by use_attention()"
            )
        check_backend(BACKEND_OF[name], self.recipe.rounds_maps)
        self.use_attention(BACKEND_OF[name])

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """The model of a folder that `save_pretrained` wrote, under the recipe that it records."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if model.config._attn_implementation in BACKEND_OF:
            model.set_attn_implementation(model.config._attn_implementation)
        if recorded := getattr(model.config, "diffquant_config", None):
            model.apply_recipe(Recipe.from_dict(recorded["recipe"]))
        return loaded

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save a checkpoint as transformers' `save_pretrained` does, with the recipe of its cache and logits.

        Raises:
            UsageError: the weights are at low bits, packed or simulated, which transformers would write at 16 bits.
        """
        if self.has_low_bit_weights:
            raise UsageError(
                "the weights of this model are at low bits, which save_pretrained cannot write: copy the quantized "
                "checkpoint's folder, or make one with diffquant.quantize"
            )
        recorded = {} if self.recipe == Recipe() else {"diffquant_config": self.recipe.to_config()}
        fields: dict[str, Any] = self.config.__dict__
        # The recipe may change while the configuration stays: it is recorded in the file alone.
        fields.pop("diffquant_config", None)
        fields.update(recorded)
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        finally:
            fields.pop("diffquant_config", None)
        if recorded and is_main_process:
            write_atomically(Path(save_directory) / "recipe.yaml", self.recipe.to_yaml())

    @property
    def has_low_bit_weights(self) -> bool:
        """Whether some weights are at low bits, packed or simulated."""
        is_packed = any(isinstance(module, QuantizedLinear) for module in self.modules())
        return is_packed or self.recipe.weights.quantizes or bool(self.recipe.weight_overrides)

    def make_tables(self) -> None:
        """Make the tensors that no checkpoint holds, after the model was made on the meta device."""

    @property
    def attentions(self) -> Sequence[PairAttention]:
        """The attention of every layer that has some, in order."""
        return [module for module in self.modules() if isinstance(module, PairAttention)]

    @abstractmethod
    def walk(self, length: int) -> Walk[Any]:
        """A walk through the layers over sequences of one length without padding."""

    @property
    def recipe(self) -> Recipe:
        return self.model.recipe

    def apply_recipe(self, recipe: Recipe) -> None:
        """Simulate the recipe's logits, operands and KV cache from now on, and start new logit reports.

        Raises:
            UsageError: an override is about a layer that is not there, or a scheme is static and its ranges are not.
        """
        layers_of = self.model.architecture.target_layers
        recipe.check_layers(layers_of)
        first = {target: f"layers.{layers[0]}.{target}" for target, layers in layers_of.items()}
        lacking = [t for t in LAYER_TARGETS if recipe.is_static(t) and first[t] not in self.model.ranges]
        if lacking:
            raise UsageError(
                f"static {', '.join(lacking)} need calibrated ranges: pass {spelled('scales')} with what "
                "calibrate wrote"
            )
        self.model.recipe = recipe
        for attention in self.attentions:
            of_layer = recipe.at_layer(attention.layer)
            attention.logits = of_layer.logits
            attention.qk, attention.p, attention.pv = of_layer.qk, of_layer.p, of_layer.pv
            # Rotations are refused where a layer keeps no keys and values of its own.
            if (rows := self.model.architecture.token_rows.get(attention.layer)) is not None:
                attention.key_rotation = self._rotation(of_layer.k, rows.keys[1])
                attention.value_rotation = self._rotation(of_layer.v, rows.values[1])
            attention.logit_ranges = self.model.ranges.get(f"layers.{attention.layer}.logits")
        self.reset_logit_report()

    def _rotation(self, scheme: Scheme, width: int) -> Tensor | None:
        """Rotation [width, width] that a scheme asks for, as exact as the model's numbers."""
        if not scheme.rotated:
            return None
        return rotation(width).to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend of `diffquant.attention.BACKENDS`, or "auto", the fastest that can.

        Raises:
            UsageError: the backend is unknown. One that cannot serve the model's tensors says so when it runs.
        """
        check_backend(backend)
        for attention in self.attentions:
            attention.backend = backend

    def new_cache(self) -> Cache:
        """An empty cache as the recipe wants it."""
        return self.model.new_cache()

    def logit_report(self) -> list[dict[str, float]]:
        """Statistics of each layer's logit quantizer: layer, calls, entries, clipped, step_mean, step_max."""
        return [{"layer": attention.layer} | attention.meter.report() for attention in self.attentions]

    def reset_logit_report(self) -> None:
        for attention in self.attentions:
            attention.meter = LogitMeter()
            attention.qk_calls = attention.pv_calls = 0

    def require_fired(self) -> None:
        """Check that every layer's quantizers of logits and of operands ran since the last reset.

        Raises:
            NotFiredError: one did not in some layers, which are named.
        """
        idle_by_target: dict[str, list[int]] = {}
        for attention in self.attentions:
            recipe = self.recipe.at_layer(attention.layer)
            for what, scheme, calls in (
                ("logits", recipe.logits, attention.meter.calls),
                ("queries and keys", recipe.qk, attention.qk_calls),
                ("softmax weights", recipe.p, attention.meter.p_calls),
                ("values before P·V", recipe.pv, attention.pv_calls),
            ):
                if scheme.quantizes and not calls:
                    idle_by_target.setdefault(what, []).append(attention.layer)
        faults = [
            f"{what} are to be quantized, but layers {', '.join(map(str, idle))} did not"
            for what, idle in idle_by_target.items()
        ]
        if faults:
            raise NotFiredError("; ".join(faults))
