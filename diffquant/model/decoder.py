"""The base class of decoders: embedding, layers made of an architecture's blocks, final norm."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import LAMBDA_VECTORS
from diffquant.model.architecture import Architecture
from diffquant.model.attention import PairAttention
from diffquant.model.blocks import Blocks
from diffquant.model.config import ArchitectureConfig
from diffquant.model.fused_cache import FusedCache
from diffquant.model.generation_modes import check_cache, explain_step_dependence
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.model.reading import CACHE, compute_positions, convert_mask, packed_sequence_mask, resolve_cache
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS

_LAMBDA_STD = 0.1


class DecoderLayer(nn.Module, ABC):
    """A layer made of its architecture's blocks.

    Its forward takes the state passed between layers, such as hidden states, and the arguments that
    `Decoder.layer_arguments` returns for the layer. It returns the next state.

    Attributes:
        window: number of newest keys that its queries see, or None if it has no window.
    """

    window: int | None = None

    def __init__(self, blocks: Blocks, layer: int) -> None:
        super().__init__()
        self.layer = layer
        for name, block in blocks.items():
            self.add_module(name, block.new_module())

    @abstractmethod
    def project(self, state: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the queries, keys and values of the layer's attention, or None if it has no attention.

        Each is [B, heads, T, width], after rotary embedding if the model has it, signal heads before noise heads.
        """

    def cached_latents(self, state: Any, *arguments: Any) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return the two tensors that the layer caches instead of keys and values, such as latents.

        Each is [B, heads, T, width]. None means that it caches keys and values.
        """
        return None


class Decoder(PreTrainedModel):
    """A decoder without its output head: embedding, layers and final norm, run under a recipe."""

    base_model_prefix = "model"
    _supports_sdpa = True
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
        # Linears with quantized weights, whose inputs a recipe may round: name here -> name in the checkpoint.
        self.quantized_linears: Mapping[str, str] = {}
        # Number of tokens in the longest sequence that was read with a quantized cache since the last reset.
        self.longest_read = 0
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PairAttention) and module.spec.lam == "exp":
            for name in LAMBDA_VECTORS:
                nn.init.normal_(getattr(module, name), 0.0, _LAMBDA_STD)

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
        """Compute hidden states [B, T, D] after the final norm.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S] over cached and new tokens, 0 at padding; or [B or 1, 1, T, S], a mask of the keys
                that each query sees (see `convert_mask`). Not needed without padding.
            position_ids: [B, T]; by default counted over tokens that are not padding. Without cache and mask,
                positions that restart mark sequences packed into one row, which do not see each other.
            past_key_values, cache: cache to read and extend; at most one of the two may be given.
            inputs_embeds: embeddings [B, T, D] instead of `input_ids`.
            use_cache: whether to create and return a cache if none was passed.
            output_hidden_states: whether to also return the embeddings and each layer's output, the last one after the
                final norm. The default is the configuration's setting.
            output_attentions: must not be true, neither here nor in the configuration.
            graphed_steps: CUDA graphs to decode with if possible.
            kwargs: other arguments, which are ignored.

        Raises:
            UsageError: inputs contradict each other, the cache does not match the recipe, or attention maps are
                requested, which are never stored. Also in a backward pass if the recipe quantizes more than weights.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise UsageError("output_attentions is not supported: attention maps are not stored")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("pass exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        held = resolve_cache(past_key_values, cache)
        if held is not None:
            check_cache(held, self.recipe, self.has_quantized_cache)
        elif use_cache:
            held = self.new_cache()
        past = held.get_seq_length() if held is not None else 0
        # Compiled code would be compiled again for each length.
        if self.has_quantized_cache and len(x) and not torch.compiler.is_compiling():
            self.longest_read = max(self.longest_read, past + x.shape[1])
        if graphed_steps is not None and held is not None and not output_hidden_states:
            replayed = self._run_graphed(graphed_steps, x, attention_mask, position_ids, held)
            if replayed is not None:
                return BaseModelOutputWithPast(last_hidden_state=replayed, **{CACHE: held})
        mask = convert_mask(attention_mask, len(x), x.shape[1], past + x.shape[1])
        if position_ids is not None and attention_mask is None and held is None:
            mask = packed_sequence_mask(position_ids) or mask
        states: list[Tensor] | None = [] if output_hidden_states else None
        # If the recipe quantizes the cache, attention reads dequantized K and V even without a cache.
        read = self.new_cache() if held is None and self.has_quantized_cache else held
        x = self.run_layers(x, mask, past, position_ids, read, states)
        if x.requires_grad and self.recipe.quantizes_any(*LAYER_TARGETS, "activations"):
            x.register_hook(_refuse_gradients)
        of_layers = None if states is None else (*states, x)
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=of_layers, **{CACHE: held})

    def run_layers(
        self,
        x: Tensor,
        mask: Mask,
        past: int,
        position_ids: Tensor | None,
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        """Compute hidden states [B, T, D] after the final norm from embedded tokens.

        Args:
            x: [B, T, D].
            mask: mask over cached and new tokens.
            past: number of cached tokens.
            position_ids: [B, T]; by default counted over tokens that are not padding.
            cache: cache to read and extend, or None.
            states: list to which the input of each layer is appended, or None.

        Raises:
            UsageError: the layers do not support the cache or the mask.
        """
        arguments, state = self.layer_arguments(x, mask, past, position_ids, cache), self.initial_state(x)
        for number, layer in enumerate(self.layers):
            if states is not None:
                states.append(self.hidden_states(state))
            state = layer(state, *arguments[number])
        return self.normalize(self.hidden_states(state))

    @abstractmethod
    def layer_arguments(
        self, x: Tensor, mask: Mask, past: int, position_ids: Tensor | None, cache: Cache | None
    ) -> Sequence[tuple[Any, ...]]:
        """Return the arguments that each layer's forward takes after the state.

        The arguments of this method are those of `run_layers`.

        Raises:
            UsageError: the layers do not support this kind of cache or mask.
        """

    def initial_state(self, x: Tensor) -> Any:
        """Return the state passed to the first layer, for embeddings [B, T, D]."""
        return x

    def hidden_states(self, state: Any) -> Tensor:
        """Return the hidden states [B, T, D] contained in the state passed between layers."""
        hidden: Tensor = state
        return hidden

    def normalize(self, x: Tensor) -> Tensor:
        """Apply the final norm to hidden states [B, T, D]."""
        normed: Tensor = self.get_submodule(self.architecture.final_norm[0])(x)
        return normed

    def _run_graphed(
        self, graphs: GraphedSteps, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache
    ) -> Tensor | None:
        """Compute hidden states [B, T, D] from embedded tokens x [B, T, D] by replaying a CUDA graph.

        The other arguments are those of `forward`. None means that it is not possible and that nothing was done.
        """
        if x.shape[1] != 1 or not isinstance(cache, FusedCache):
            return None
        if attention_mask is not None and attention_mask.dim() != 2:
            return None
        if position_ids is None:
            valid = None if attention_mask is None else attention_mask.bool()
            position_ids = compute_positions(valid, cache.get_seq_length(), 1, x.device)

        def step(x: Tensor, positions: Tensor, mask: Mask) -> Tensor:
            return self.run_layers(x, mask, 0, positions, cache, None)

        return graphs.run(step, cache, x, position_ids, attention_mask)

    def new_graphs(self, cache: Cache | None = None, tokens: int = 0) -> GraphedSteps | None:  # noqa: ARG002
        """Return CUDA graphs for a call of `generate`, or None if its steps cannot be recorded.

        On CUDA devices, the reason for None is logged.

        Args:
            cache: cache that the call created, or None if its caller passed one.
            tokens: largest number of tokens that the cache may hold at the end of the call.
        """
        return None

    def keep_graphs(self, graphs: GraphedSteps) -> None:
        """Keep CUDA graphs and their cache, so that the next call of `generate` may reuse them."""

    @property
    def has_quantized_cache(self) -> bool:
        return self.recipe.quantizes_any("k", "v")

    @property
    def has_windows(self) -> bool:
        """Whether some layers cache only the newest tokens."""
        return any(rows.window is not None for rows in self.architecture.cached_shapes.values())

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  some models look at it
        """Return whether `generate` must use `new_cache`.

        Args:
            implementation: the caller's `cache_implementation`, if any.
        """
        return self.has_quantized_cache

    @property
    def crop_refusal(self) -> str | None:
        """Reason why the cache from `new_cache` cannot drop its newest tokens, or None if it can."""
        return None

    def explain_step_dependence(self, tokens: int) -> str | None:  # noqa: ARG002  some models look at it
        """Return why results for up to `tokens` tokens depend on how many are read at once, or None if they do not."""
        return explain_step_dependence(self.recipe, self.has_windows)

    @abstractmethod
    def new_cache(self) -> Cache:
        """Return a new empty cache for the recipe."""


def _refuse_gradients(_: Tensor) -> None:
    raise UsageError(
        "rounded caches and operands of attention have no gradients: train at 16 bits, after "
        "model.apply_recipe(diffquant.Recipe()), and quantize the trained model"
    )
