"""The base of every model that runs: a decoder under a recipe, its head, its caches and its reports."""

import inspect
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from diffquant.attention import LogitMeter, check_backend
from diffquant.errors import NotFiredError, UsageError
from diffquant.model.attention import PairAttention
from diffquant.model.cache_argument import CACHE, pop_cache
from diffquant.model.config import ArchitectureConfig
from diffquant.model.decoder import CausalPreTrainedModel, Decoder
from diffquant.model.finite import FiniteLogits
from diffquant.model.generation_modes import BACKEND_OF, asked, check_generation
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.model.walk import Walk
from diffquant.numbers.rotation import rotation
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.scheme import Scheme
from diffquant.support.files import write_atomically
from diffquant.support.spelling import spelled


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
        cache: Cache | None = None,
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
        """Run transformers' `generate`, with the recipe's cache unless one is passed.

        Raises:
            UsageError: what is asked for is not computed, or would give other tokens than greedy search does.
            NonFiniteError: logits overflow; the layer where that begins is named.
        """
        given = inspect.signature(super().generate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        check_generation(self, given)
        makes_cache = self.model.needs_own_cache(asked(self, given, "cache_implementation"))
        cache = pop_cache(given)
        if makes_cache and asked(self, given, "use_cache") is not False and cache is None:
            cache = self.new_cache()
        if cache is not None:
            given[CACHE] = cache
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

    def apply_recipe(self, recipe: RecipeLike) -> None:
        """Simulate the recipe's logits, operands and KV cache from now on, and start new logit reports.

        The weights stay as they were loaded, and so does what `recipe` says of them.

        Raises:
            UsageError: it has other weights, does not fit the model's layers, or a scheme is static and its ranges are
                not there.
        """
        wanted = Recipe.parse(recipe)
        recipe = wanted.with_weights_of(self.recipe)
        if wanted != recipe and (wanted.weights.quantizes or wanted.weight_overrides):
            raise UsageError(
                "the recipe's weights are not those that this model was loaded with, and a loaded model's are not "
                "rounded again: load the checkpoint with this recipe, or leave out its weights"
            )
        self.model.architecture.check_recipe(recipe)
        layers_of = self.model.architecture.target_layers
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
