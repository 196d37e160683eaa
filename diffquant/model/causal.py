"""The base class of all models: a decoder under a recipe with its output head, caches and reports."""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from diffquant.attention import check_backend
from diffquant.errors import DiffQuantError, UsageError
from diffquant.model.attention import PairAttention
from diffquant.model.config import ArchitectureConfig
from diffquant.model.decoder import Decoder
from diffquant.model.generation_modes import (
    BACKEND_OF,
    FiniteLogitsProcessor,
    check_generation,
    max_total_length,
    resolve_setting,
)
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.model.inputs import InputRounding, add_input_rounding
from diffquant.model.linears import QuantizedLinear
from diffquant.model.reading import CACHE, pop_cache
from diffquant.model.walk import LayerRunner
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.support.files import write_atomically
from diffquant.support.names import first_few, option_name


class CausalModel(PreTrainedModel, GenerationMixin):
    """A decoder-only language model with differential (or plain) attention.

    `apply_recipe` changes the simulated precision of logits, operands and KV cache. Weights are quantized when they are
    loaded.
    """

    base_model_prefix = "model"
    _supports_sdpa = True
    decoder_class: ClassVar[type[Decoder]]
    config: ArchitectureConfig
    model: Decoder
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # transformers' Trainer shifts smoothed labels, and its pipelines take models, by the names in this table.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        # By default transformers infers it from a class name that ends so; Trainer counts a batch's labels by it.
        self.loss_type = "ForCausalLM"
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.input_roundings: dict[str, InputRounding] = {}
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
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute vocabulary logits [B, T, V] and, with labels, the loss.

        Args:
            labels: [B, T], as in transformers: they are shifted by one position here, and -100 is ignored.
            logits_to_keep: number of last positions, or indices of positions, to compute logits of; 0 means all.
            kwargs: arguments of the loss function.

        The other arguments are those of `Decoder.forward`.
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
            cache=cache,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, positions])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=out.hidden_states, **{CACHE: getattr(out, CACHE)}
        )

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' `generate` with the recipe's cache, unless the caller passes one.

        Raises:
            UsageError: an option is not supported, or would change the tokens that greedy decoding generates.
            NonFiniteError: logits are NaN or infinite; the message names the first layer with such an output.
        """
        given = inspect.signature(super().generate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        check_generation(self, given)
        makes_cache = self.model.needs_own_cache(resolve_setting(self, given, "cache_implementation"))
        cache, made = pop_cache(given), None
        if makes_cache and resolve_setting(self, given, "use_cache") is not False and cache is None:
            cache = made = self.new_cache()
        if cache is not None:
            given[CACHE] = cache
        graphs = None
        # With an assistant there are no graphs, since `generate` would pass them to the assistant too.
        if given.get("assistant_model") is None and "graphed_steps" not in given:
            graphs = self.model.new_graphs(made, max_total_length(self, given))
        if graphs is not None:
            given["graphed_steps"] = graphs
        # An assistant's call gets the guard of the main model, which is replaced by its own.
        guards = [each for each in given.get("logits_processor") or [] if not isinstance(each, FiniteLogitsProcessor)]
        has_ids = given.get("inputs_embeds") is None
        guards.append(FiniteLogitsProcessor(self, given.get("attention_mask"), has_ids))
        given["logits_processor"] = LogitsProcessorList(guards)
        result = super().generate(**given)
        # If only tokens are returned, the caller has no reference to the cache, so the next call may reuse it.
        if graphs is not None and made is not None and isinstance(result, Tensor):
            self.model.keep_graphs(graphs)
        return result

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse continuous batching, which `generate_batch` would use.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "continuous batching (generate_batch) needs transformers' attention interface, which this model does not "
            "use; call generate with a batch, padded on the left"
        )

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *_: Any, **__: Any) -> None:
        """Select the attention implementation by transformers' name.

        "sdpa" picks the fastest backend available, "eager" computes whole maps in memory, and "flash_attention_2" uses
        FlashAttention.

        Raises:
            UsageError: the name is none of these, or the recipe quantizes logits and the backend does not support that.
        """
        name = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        if name not in BACKEND_OF:
            raise UsageError(
                f"attn_implementation {name!r} is not supported; choose {', '.join(BACKEND_OF)}, or call "
                "use_attention() with one of diffquant's backends"
            )
        check_backend(BACKEND_OF[name], self.recipe.map_rounding_choices)
        self.use_attention(BACKEND_OF[name])

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model from a folder written by `save_pretrained`, and apply the recipe stored there."""
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
        """Save a checkpoint like transformers' `save_pretrained`, with the recipe for cache, logits and operands.

        Raises:
            UsageError: weights are quantized, packed or simulated; transformers would write them at 16 bits.
        """
        if self.has_low_bit_weights:
            raise UsageError(
                "the weights of this model are at low bits, which save_pretrained cannot write: copy the quantized "
                "checkpoint's folder, or make one with diffquant.quantize"
            )
        recorded = {} if self.recipe == Recipe() else {"diffquant_config": self.recipe.to_config()}
        fields: dict[str, Any] = self.config.__dict__
        # The recipe is written to the file but not kept in the configuration, where it would not follow later changes.
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
        """Whether some weights are quantized, packed or simulated."""
        is_packed = any(isinstance(module, QuantizedLinear) for module in self.modules())
        return is_packed or self.recipe.weights.quantizes or bool(self.recipe.weight_overrides)

    def compute_missing_tensors(self) -> None:
        """Compute tensors that checkpoints lack, such as RoPE's frequencies, after creation on the meta device."""

    @property
    def attention_modules(self) -> Sequence[PairAttention]:
        """Attention modules in order of layers."""
        return [module for module in self.modules() if isinstance(module, PairAttention)]

    def new_layer_runner(self, length: int) -> LayerRunner[Any]:
        """Return a `LayerRunner`, which runs the layers one by one over unpadded sequences of `length` tokens."""
        return LayerRunner(self.model, length)

    @property
    def recipe(self) -> Recipe:
        return self.model.recipe

    def apply_recipe(self, recipe: RecipeLike) -> None:
        """Quantize logits, operands, activations and KV cache by a recipe from now on, and reset the logit report.

        Weights, and the weight settings of the model's recipe, do not change.

        Raises:
            UsageError: the recipe's weights differ from the loaded ones, it does not fit the model's layers, a
                scheme is static but the model has no calibrated ranges for it, or it quantizes activations although no
                weights are quantized.
        """
        wanted = Recipe.parse(recipe)
        recipe = wanted.with_weights_of(self.recipe)
        if wanted != recipe and (wanted.weights.quantizes or wanted.weight_overrides):
            raise UsageError(
                "the recipe's weight schemes differ from those with which this model was loaded, and loaded weights "
                "cannot be quantized again: load the checkpoint with this recipe, or leave out its weights"
            )
        self.model.architecture.check_recipe(recipe)
        layers_of = self.model.architecture.target_layers
        first = {target: f"layers.{layers[0]}.{target}" for target, layers in layers_of.items()}
        lacking = [t for t in LAYER_TARGETS if recipe.is_static(t) and first[t] not in self.model.ranges]
        if lacking:
            raise UsageError(
                f"static {', '.join(lacking)} need calibrated ranges: pass {option_name('scales')} with a "
                "file from diffquant calibrate"
            )
        for rounding in self.input_roundings.values():
            rounding.remove()
        self.input_roundings = add_input_rounding(self, self.model.quantized_linears, recipe)
        self.model.recipe = recipe
        wide = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for attention in self.attention_modules:
            rows = self.model.architecture.cached_shapes.get(attention.layer)
            widths = None if rows is None else (rows.keys[1], rows.values[1])
            attention.apply_recipe(recipe.at_layer(attention.layer), widths, wide)
            attention.logit_ranges = self.model.ranges.get(f"layers.{attention.layer}.logits")
        self.reset_logit_report()

    def use_attention(self, backend: str) -> None:
        """Choose the attention backend: a name in `diffquant.attention.BACKENDS`, or "auto" for the fastest available.

        Raises:
            UsageError: the backend is unknown. A backend that does not support the recipe or the model's tensors
                raises it later, when it runs.
        """
        check_backend(backend)
        for attention in self.attention_modules:
            attention.backend = backend

    def new_cache(self) -> Cache:
        """Return a new empty cache for the recipe."""
        return self.model.new_cache()

    def logit_report(self) -> list[dict[str, float]]:
        """Return statistics of quantized logits, one mapping per layer.

        The keys are layer, calls, entries, clipped, step_mean and step_max.
        """
        return [{"layer": attention.layer} | attention.meter.report() for attention in self.attention_modules]

    def reset_logit_report(self) -> None:
        """Reset the statistics of `logit_report` and the counters that `check_quantizers_ran` reads."""
        self.model.longest_read = 0
        for attention in self.attention_modules:
            attention.reset_counts()
        for rounding in self.input_roundings.values():
            rounding.calls = 0

    def check_quantizers_ran(self) -> None:
        """Check that each layer's quantizers of cache, logits, operands and activations ran since the last reset.

        Raises:
            DiffQuantError: a quantizer did not run; the message names the layers or Linears concerned, or the number
                of tokens from which on the cache is quantized.
        """
        idle_by_target: dict[str, list[int]] = {}
        for attention in self.attention_modules:
            for what in attention.idle_quantizers(self.recipe.at_layer(attention.layer)):
                idle_by_target.setdefault(what, []).append(attention.layer)
        faults = [
            f"the recipe quantizes {what}, but layers {', '.join(map(str, idle))} did not"
            for what, idle in idle_by_target.items()
        ]
        longest = self.model.longest_read
        for scheme in sorted(self.recipe.schemes_of("k") | self.recipe.schemes_of("v"), key=str):
            fewest = self.recipe.residual + scheme.sharing.tokens_per_scale
            if scheme.quantizes and 0 < longest < fewest:
                faults.append(
                    f"a cache at {scheme} quantizes texts of {fewest} tokens or more, but the longest had {longest}; "
                    "read longer ones"
                )
        if unrounded := [name for name, rounding in self.input_roundings.items() if not rounding.calls]:
            faults.append(
                f"the recipe quantizes activations, but the inputs of {first_few(unrounded, ', ')} were not quantized"
            )
        if faults:
            raise DiffQuantError("; ".join(faults))
