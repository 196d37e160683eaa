"""DiffTransformer: Llama's decoder layer with the attention of any `DiffSpec`, plain attention included."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.family.mask import Mask
from diffquant.model.adapters.sizes import MOVING_ROPE
from diffquant.model.attention import DiffAttention
from diffquant.model.cache import PackedCache
from diffquant.model.causal import CausalModel
from diffquant.model.config import ArchitectureConfig, DiffTransformerConfig
from diffquant.model.decoder import Decoder, DecoderLayer
from diffquant.model.fused_cache import FusedCache, fused_cache_refusal, warn_of_slow_decoding
from diffquant.model.graphed_steps import GraphedSteps, warn_of_ungraphed_decoding
from diffquant.model.reading import compute_positions


class DiffLayer(DecoderLayer):
    """Attention and an MLP, each applied to the normed residual stream and added to it."""

    self_attn: DiffAttention
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask, cache: Cache | None) -> Tensor:
        attended: Tensor = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out

    def project(self, state: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(state), arguments[0])


# Attribute in which a decoder keeps the recorded steps of its last `generate` call; they are not a submodule.
_GRAPHS = "_graphs"


class DiffTransformerModel(Decoder):
    """The decoder without its output head: embedding, layers, final norm."""

    config_class = DiffTransformerConfig
    layer_class = DiffLayer
    norm: nn.Module

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def layer_arguments(
        self, x: Tensor, mask: Mask, past: int, position_ids: Tensor | None, cache: Cache | None
    ) -> Sequence[tuple[Any, ...]]:
        if position_ids is None:
            position_ids = compute_positions(mask.keys, past, x.shape[1], x.device)
        return [(self.rotary_emb(x, position_ids=position_ids), mask, cache)] * len(self.layers)

    @property
    def has_fused_cache(self) -> bool:
        """Whether decoding uses the kernels that read the packed cache; if not, the reason is logged on CUDA."""
        refusal = fused_cache_refusal(self.recipe, self.architecture.diff_spec, self.dtype, self.device)
        if refusal is not None and self.device.type == "cuda":
            warn_of_slow_decoding(refusal)
        return refusal is None

    def new_graphs(self, cache: Cache | None = None, tokens: int = 0) -> GraphedSteps | None:
        if self.device.type != "cuda" or not self.has_fused_cache:
            return None
        if (refusal := self._graph_refusal()) is not None:
            warn_of_ungraphed_decoding(refusal)
            return None
        return self.reuse_or_create_graphs(cache, tokens)

    def reuse_or_create_graphs(self, cache: Cache | None, tokens: int) -> GraphedSteps:
        """Return graphs for a call of `generate`: the previous call's if the model is unchanged, else new ones.

        Only a call that created its cache may reuse graphs.
        """
        graphs = None
        if isinstance(cache, FusedCache):
            graphs = self.__dict__.pop(_GRAPHS, None)
            graphs = graphs if graphs is not None and graphs.is_model_unchanged(self) else GraphedSteps()
            cache.plan_memory_for(tokens, graphs.reuse_store)
        return graphs or GraphedSteps()

    def keep_graphs(self, graphs: GraphedSteps) -> None:
        if graphs.remember_model(self):
            self.__dict__[_GRAPHS] = graphs

    def _graph_refusal(self) -> str | None:
        """Return why a step that the decode kernel supports cannot be recorded, or None if it can."""
        attentions = [cast(DiffLayer, layer).self_attn for layer in self.layers]
        if chosen := sorted({attention.backend for attention in attentions} - {"auto"}):
            return f"attention uses the backend {', '.join(chosen)}"
        if any(attention.logits.quantizes for attention in attentions):
            return "attention logits are quantized, which needs dequantized K and V"
        if any(attention.has_quantizers for attention in attentions):
            return "operands of attention's products are quantized, which needs dequantized K and V"
        # accelerate's hooks move weights between devices, which cannot be recorded.
        if any(hasattr(layer, "_hf_hook") for layer in self.layers):
            return "the model is spread over several devices"
        if self.rotary_emb.rope_type in MOVING_ROPE:
            return f"RoPE of type {self.rotary_emb.rope_type} has frequencies that depend on the positions"
        return None

    @property
    def crop_refusal(self) -> str | None:
        blocks = [scheme for scheme in self.recipe.schemes_of("k") if not scheme.sharing.is_token_local]
        if blocks and self.has_fused_cache:
            return f"keys at {blocks[0]} are packed by blocks of tokens, which do not fit the kernels' cache"
        return None

    def explain_step_dependence(self, tokens: int) -> str | None:
        rope, known = self.rotary_emb.rope_type, self.config.max_position_embeddings
        fixed = self.config.rope_parameters.get("original_max_position_embeddings", known)
        if rope in MOVING_ROPE and tokens > fixed:
            return f"above {fixed} tokens the angles of RoPE of type {rope} depend on the length"
        return super().explain_step_dependence(tokens)

    def needs_own_cache(self, implementation: str | None) -> bool:
        return self.has_quantized_cache or (self.has_fused_cache and implementation is None)

    def new_cache(self) -> Cache:
        """Return a new empty KV cache for the recipe, of the fastest kind that the device supports."""
        # The kernels have no backward pass.
        if self.has_fused_cache and not torch.is_grad_enabled():
            return FusedCache(self.recipe, len(self.layers))
        return PackedCache(self.recipe, len(self.layers), self.ranges) if self.has_quantized_cache else DynamicCache()


class DiffTransformer(CausalModel):
    """A decoder-only language model with differential (or plain) attention in each layer."""

    config_class = DiffTransformerConfig
    decoder_class = DiffTransformerModel
    model: DiffTransformerModel

    def compute_missing_tensors(self) -> None:
        self.model.rotary_emb = LlamaRotaryEmbedding(self.config)
