"""DiffTransformer: one model for the whole family, plain Transformer included.

Llama's decoder layer around attention that a `DiffSpec` describes.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from diffquant.attention import LogitMeter, check_backend
from diffquant.errors import NotFiredError, UsageError
from diffquant.family.mask import Mask
from diffquant.model.attention import DiffAttention
from diffquant.model.cache import PackedCache
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.fused_cache import FusedCache, fused_cache_refusal, warn_of_slow_decoding
from diffquant.model.mlp import DiffMLP
from diffquant.model.quantized_linear import QuantizedLinear
from diffquant.model.shapes import LAMBDA_VECTORS
from diffquant.recipe import LAYER_TARGETS, Recipe

_LAMBDA_STD = 0.1


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


class DiffPreTrainedModel(PreTrainedModel):
    """A model of this family as transformers sees it: its configuration, and how λ starts."""

    config_class = DiffTransformerConfig
    config: DiffTransformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["DiffLayer"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiffAttention) and module.spec.lam == "exp":
            for name in LAMBDA_VECTORS:
                nn.init.normal_(getattr(module, name), 0.0, _LAMBDA_STD)


class DiffTransformerModel(DiffPreTrainedModel):
    """The decoder without its head: embedding, layers, final norm."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DiffLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.recipe = Recipe()
        self.ranges: Mapping[str, Tensor] = {}
        self.post_init()

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
        **kwargs: Any,  # noqa: ARG002  transformers passes every model more than it may need
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D] behind the final norm.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S] over cached and new tokens, 0 where padding; None without padding.
            position_ids: [B, T]; counted over what is not padding by default.
            past_key_values: cache to read and extend.
            inputs_embeds: embeddings [B, T, D] in place of `input_ids`.
            use_cache: whether to return a cache where none was passed.
            output_hidden_states: whether to return the embeddings and each layer's output too, the last one normed.
            output_attentions: refused where true.
            kwargs: other arguments, none of which changes the result.

        Raises:
            UsageError: inputs contradict each other, or attention maps are asked for, which are never stored.
        """
        if output_attentions:
            raise UsageError("output_attentions is not supported: attention maps are not kept")
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("pass either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        # Attention reads K and V as a quantized cache stores them, also where the caller keeps none.
        cache = self.new_cache() if past_key_values is None and self.has_quantized_cache else past_key_values
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = x.shape[1]
        valid = _valid_keys(attention_mask, past + length)
        if position_ids is None:
            position_ids = _positions(valid, past, length, x.device)
        rotary = self.rotary_emb(x, position_ids=position_ids)
        mask = Mask(valid)
        states = []
        for layer in self.layers:
            if output_hidden_states:
                states.append(x)
            x = layer(x, rotary, mask, cache)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if output_hidden_states else None,
        )

    @property
    def has_quantized_cache(self) -> bool:
        return any(scheme.quantizes for target in ("k", "v") for scheme in self.recipe.schemes_of(target))

    @property
    def has_fused_cache(self) -> bool:
        """Whether decoding runs on the kernels that read the cache as it is stored; on CUDA it is said why not."""
        refusal = fused_cache_refusal(self.recipe, self.config.diff_spec, self.dtype, self.device)
        if refusal is not None and self.device.type == "cuda":
            warn_of_slow_decoding(refusal)
        return refusal is None

    def new_cache(self) -> Cache:
        """An empty KV cache as the recipe wants it, and the fastest that the device has for that."""
        # The kernels have no backward pass.
        if self.has_fused_cache and not torch.is_grad_enabled():
            return FusedCache(self.recipe, len(self.layers))
        return PackedCache(self.recipe, len(self.layers), self.ranges) if self.has_quantized_cache else DynamicCache()


class DiffTransformer(DiffPreTrainedModel, GenerationMixin):
    """A decoder-only language model with differential (or plain) attention.

    `apply_recipe` switches the simulated precision of logits and KV cache; weights are quantized
    when they are loaded.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Vocabulary logits [B, T, V]; with `logits_to_keep` n only the last n positions, or those indexed.

        Other arguments: as `DiffTransformerModel.forward`.
        """
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            output_attentions,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, positions])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens from transformers' `generate`, with the recipe's KV cache unless one is passed."""
        makes_cache = self.model.has_quantized_cache or (
            self.model.has_fused_cache and kwargs.get("cache_implementation") is None
        )
        if makes_cache and kwargs.get("use_cache") is not False:
            kwargs.setdefault("past_key_values", self.new_cache())
        return super().generate(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as transformers' `save_pretrained` does.

        Raises:
            UsageError: the weights are packed, in the kernels' layout, which is no checkpoint's.
        """
        packed = sum(isinstance(module, QuantizedLinear) for module in self.modules())
        if packed:
            raise UsageError(
                f"{packed} weights of this model are packed for its kernels, which no checkpoint holds; the checkpoint "
                "it was loaded from has them, or load it with packed=False"
            )
        super().save_pretrained(*args, **kwargs)

    @property
    def recipe(self) -> Recipe:
        return self.model.recipe

    def apply_recipe(self, recipe: Recipe) -> None:
        """Simulate the recipe's logits and KV cache from now on, and start new logit reports.

        Raises:
            UsageError: an override is about a layer that is not there, or a scheme is static and its ranges are not.
        """
        recipe.check_layers(len(self.model.layers))
        lacking = [t for t in LAYER_TARGETS if recipe.is_static(t) and f"layers.0.{t}" not in self.model.ranges]
        if lacking:
            raise UsageError(
                f"static {', '.join(lacking)} need calibrated ranges: pass --scales with diffquant calibrate's file"
            )
        self.model.recipe = recipe
        for attention in self.attentions:
            attention.logits = recipe.at_layer(attention.layer).logits
            attention.logit_ranges = self.model.ranges.get(f"layers.{attention.layer}.logits")
        self.reset_logit_report()

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend of `diffquant.attention.BACKENDS`, or "auto", the fastest that can.

        Raises:
            UsageError: the backend is unknown. One that cannot serve the model's tensors says so when it runs.
        """
        check_backend(backend)
        for attention in self.attentions:
            attention.backend = backend

    @property
    def attentions(self) -> list[DiffAttention]:
        """Every layer's attention, in order."""
        return [cast(DiffLayer, layer).self_attn for layer in self.model.layers]

    def new_cache(self) -> Cache:
        """An empty KV cache as the recipe wants it."""
        return self.model.new_cache()

    def logit_report(self) -> list[dict[str, float]]:
        """Counts of what each layer's logit quantizer did: layer, calls, entries, clipped, step_mean, step_max."""
        return [{"layer": attention.layer} | attention.meter.report() for attention in self.attentions]

    def reset_logit_report(self) -> None:
        for attention in self.attentions:
            attention.meter = LogitMeter()

    def require_fired(self) -> None:
        """Check that every layer's logit quantizer ran since the last reset.

        Raises:
            NotFiredError: it did not in some layers, which are named.
        """
        not_called = [attention.layer for attention in self.attentions if not attention.meter.calls]
        idle = [str(layer) for layer in not_called if self.recipe.at_layer(layer).logits.quantizes]
        if idle:
            raise NotFiredError(f"logits are to be quantized, but layers {', '.join(idle)} did not")


def _valid_keys(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """Validity [B, S] of positions, as `Mask` takes it."""
    if attention_mask is None or attention_mask.all():
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise UsageError(
            f"attention_mask must be [batch, {keys}] over cached and new tokens, got {list(attention_mask.shape)}"
        )
    return attention_mask.bool()


def _positions(valid: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Positions [B or 1, T] of new tokens, counted over what is not padding."""
    if valid is None:
        return torch.arange(past, past + length, device=device)[None]
    return (valid.long().cumsum(1) - 1).clamp_(min=0)[:, past:]


AutoConfig.register("diff_transformer", DiffTransformerConfig)
AutoModelForCausalLM.register(DiffTransformerConfig, DiffTransformer)
