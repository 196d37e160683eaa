"""DiffTransformer: one model for all of the family that has a Transformer's layers, plain Transformer included.

Llama's decoder layer around attention that a `DiffSpec` describes.
"""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from diffquant.family.mask import Mask
from diffquant.model.attention import DiffAttention
from diffquant.model.cache import PackedCache, PackedLayer
from diffquant.model.causal import CausalModel, Decoder
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.fused_cache import FusedCache, fused_cache_refusal, warn_of_slow_decoding
from diffquant.model.mlp import DiffMLP
from diffquant.model.walk import CAUSAL, Walk
from diffquant.recipe import LAYER_TARGETS, Recipe


class DiffLayer(nn.Module):
    """Attention and a gated network, each behind its norm and added to the residual."""

    def __init__(self, config: DiffTransformerConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DiffAttention(config, layer)
        self.mlp = DiffMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask, cache: Cache | None) -> Tensor:
        attended: Tensor = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache)
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


class DiffTransformerModel(Decoder):
    """The decoder without its head: embedding, layers, final norm."""

    config_class = DiffTransformerConfig
    config: DiffTransformerConfig
    _no_split_modules = ["DiffLayer"]  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DiffLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.recipe = Recipe()
        self.ranges: Mapping[str, Tensor] = {}
        self.post_init()

    def run_layers(
        self,
        x: Tensor,
        valid: Tensor | None,
        past: int,
        position_ids: Tensor | None,
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        if position_ids is None:
            position_ids = _positions(valid, past, x.shape[1], x.device)
        rotary = self.rotary_emb(x, position_ids=position_ids)
        mask = Mask(valid)
        for layer in self.layers:
            if states is not None:
                states.append(x)
            x = layer(x, rotary, mask, cache)
        normed: Tensor = self.norm(x)
        return normed

    @property
    def has_fused_cache(self) -> bool:
        """Whether decoding runs on the kernels that read the cache as it is stored; on CUDA it is said why not."""
        refusal = fused_cache_refusal(self.recipe, self.config.diff_spec, self.dtype, self.device)
        if refusal is not None and self.device.type == "cuda":
            warn_of_slow_decoding(refusal)
        return refusal is None

    def needs_own_cache(self, implementation: str | None) -> bool:
        return self.has_quantized_cache or (self.has_fused_cache and implementation is None)

    def new_cache(self) -> Cache:
        """An empty KV cache as the recipe wants it, and the fastest that the device has for that."""
        # The kernels have no backward pass.
        if self.has_fused_cache and not torch.is_grad_enabled():
            return FusedCache(self.recipe, len(self.layers))
        return PackedCache(self.recipe, len(self.layers), self.ranges) if self.has_quantized_cache else DynamicCache()


class DiffTransformer(CausalModel):
    """A decoder-only language model with differential (or plain) attention in each layer."""

    config_class = DiffTransformerConfig
    config: DiffTransformerConfig
    model: DiffTransformerModel
    _no_split_modules = ["DiffLayer"]  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_tables(self) -> None:
        self.model.rotary_emb = LlamaRotaryEmbedding(self.config)

    @property
    def attentions(self) -> Sequence[DiffAttention]:
        """Every layer's attention, in order."""
        return [cast(DiffLayer, layer).self_attn for layer in self.model.layers]

    @property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        return dict.fromkeys(LAYER_TARGETS, range(len(self.model.layers)))

    def walk(self, length: int) -> "TransformerWalk":
        return TransformerWalk.over(self, length)

    def stored_layers(self) -> Sequence[PackedLayer]:
        # Not the model's own kind of cache: on CUDA that one has room for tokens to come.
        cache = PackedCache(self.recipe, len(self.model.layers), self.model.ranges)
        return [cast(PackedLayer, layer) for layer in cache.layers]


@dataclass(frozen=True)
class TransformerWalk(Walk[Tensor]):
    """A DiffTransformer's layers over sequences; what goes from layer to layer is the hidden states [B, T, D].

    Attributes:
        model: model that is walked through.
        rotary: cosines and sines of the positions, [1, T, d] each.
    """

    model: DiffTransformer
    rotary: tuple[Tensor, Tensor]

    @classmethod
    def over(cls, model: DiffTransformer, length: int) -> "TransformerWalk":
        positions = torch.arange(length, device=model.device)[None]
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        return cls(model, model.model.rotary_emb(like, position_ids=positions))

    @property
    def layers(self) -> list[DiffLayer]:
        return [cast(DiffLayer, layer) for layer in self.model.model.layers]

    def embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.model.model.embed_tokens(ids)
        return x

    def hidden(self, state: Tensor) -> Tensor:
        return state

    def run(self, layer: nn.Module, state: Tensor) -> Tensor:
        cache = self.model.new_cache() if self.model.model.has_quantized_cache else None
        y: Tensor = layer(state, self.rotary, CAUSAL, cache)
        return y

    def project(self, layer: nn.Module, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = cast(DiffLayer, layer)
        return layer.self_attn.project(layer.input_layernorm(state), self.rotary)


def _positions(valid: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Positions [B or 1, T] of new tokens, counted over what is not padding."""
    if valid is None:
        return torch.arange(past, past + length, device=device)[None]
    return (valid.long().cumsum(1) - 1).clamp_(min=0)[:, past:]
