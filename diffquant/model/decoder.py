"""The base of every decoder: embedding, layers of its architecture's blocks, final norm, under a recipe's cache."""

from abc import abstractmethod
from collections.abc import Mapping, MutableSequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from diffquant.errors import UsageError
from diffquant.family.lam import LAMBDA_VECTORS
from diffquant.family.mask import Mask
from diffquant.model.architecture import Architecture
from diffquant.model.attention import PairAttention
from diffquant.model.attention_mask import packed_mask, read_mask
from diffquant.model.blocks import Blocks
from diffquant.model.cache_argument import CACHE, given_cache
from diffquant.model.config import ArchitectureConfig
from diffquant.model.generation_modes import check_cache, dependence_on_steps
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS

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
        self.layers = nn.ModuleList([self.layer_class(blocks, layer) for layer, blocks in layers])
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
        cache: Cache | None = None,
        **kwargs: Any,  # noqa: ARG002  transformers passes every model more than it may need
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D] after the final norm.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S] over cached and new tokens, 0 where padding; or [B or 1, 1, T, S], which keys each
                query sees, as `read_mask` takes it. Not needed without padding.
            position_ids: [B, T]; counted over what is not padding by default. Where they start again, without cache
                and mask, sequences are packed into one row and do not see each other.
            past_key_values, cache: cache to read and extend, by either name.
            inputs_embeds: embeddings [B, T, D] in place of `input_ids`.
            use_cache: whether to return a cache if none was passed.
            output_hidden_states: whether to return the embeddings and each layer's output too, the last one normed;
                the configuration's choice by default.
            output_attentions: refused where true, here or in the configuration.
            graphed_steps: graphs to decode with if possible.
            kwargs: other arguments, none of which changes the result.

        Raises:
            UsageError: inputs contradict each other, a cache does not keep what the recipe says, or attention maps are
                asked for, which are never stored; in a backward pass, the recipe rounds more than weights.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise UsageError("output_attentions is not supported: attention maps are not kept")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("pass either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        held = given_cache(past_key_values, cache)
        if held is not None:
            check_cache(held, self.recipe, self.has_quantized_cache)
        elif use_cache:
            held = self.new_cache()
        past = held.get_seq_length() if held is not None else 0
        if graphed_steps is not None and held is not None and not output_hidden_states:
            replayed = self.run_graphed(graphed_steps, x, attention_mask, position_ids, held)
            if replayed is not None:
                return BaseModelOutputWithPast(last_hidden_state=replayed, **{CACHE: held})
        mask = read_mask(attention_mask, len(x), x.shape[1], past + x.shape[1])
        if position_ids is not None and attention_mask is None and held is None:
            mask = packed_mask(position_ids) or mask
        states: list[Tensor] | None = [] if output_hidden_states else None
        # Attention reads K and V as a quantized cache stores them, also where the caller keeps none.
        read = self.new_cache() if held is None and self.has_quantized_cache else held
        x = self.run_layers(x, mask, past, position_ids, read, states)
        if x.requires_grad and self.recipe.rounds(*LAYER_TARGETS):
            x.register_hook(_refuse_gradients)
        of_layers = None if states is None else (*states, x)
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=of_layers, **{CACHE: held})

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
        return self.recipe.rounds("k", "v")

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


def _refuse_gradients(_: Tensor) -> None:
    raise UsageError(
        "rounded caches and operands of attention have no gradients: train at 16 bits, after "
        "model.apply_recipe(diffquant.Recipe()), and quantize what is trained"
    )
