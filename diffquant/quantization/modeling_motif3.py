# SPDX-License-Identifier: Apache-2.0
"""Motif-3 for transformers. It does not need diffquant.

Attention is grouped: several signal heads and one noise head use the same keys and values, which are computed from a
latent. Most layers see only the newest tokens. Most networks are mixtures of experts. A sublayer reads a weighted sum
of several residual streams, and adds its output to a mixture of them. Keys and values are cached as transformers caches
those of any model, so that its caches, masks and attention functions serve.

B is the batch, T the number of new tokens, S that of cached and new ones, D the hidden width, E the number of residual
streams, H the number of heads and G that of groups.

Sources: MotifTechnologies' vLLM port; arXiv 2512.24880 for the streams; arXiv 2411.03884 for PolyNorm.
"""

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, eager_attention_forward
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
    apply_rotary_pos_emb,
)
from transformers.utils import logging

MODEL_TYPE = "Motif"
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_EPS, _SMALLEST_SUM, _SMALLEST_SHARE = 1e-6, 1e-8, 1e-20
_LARGEST_GATE, _LARGEST_MIX = 10.0, 20.0
_NOT_HERE = "{} of the recipe are not applied here: this model keeps them in {}; diffquant.load applies them"
Rotary = tuple[Tensor, Tensor]


class Motif3Config(PreTrainedConfig):
    """A model's settings, named as in Motif-3's config.json. Folders that diffquant writes state all of them.

    `sliding_window` is transformers' in an object: it counts a query's own token, which config.json does not.
    """

    model_type = MODEL_TYPE
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    max_position_embeddings: int = 262144
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.sliding_window is not None:
            self.sliding_window += 1
        # `rope_parameters` contains their values.
        super().__post_init__(**{name: x for name, x in kwargs.items() if name not in ("rope_theta", "rope_scaling")})

    @property
    def layer_types(self) -> list[str]:
        period = self.num_hidden_layers if self.sliding_window is None else self.sliding_window_period
        return [_WINDOWED if layer % period else _FULL for layer in range(self.num_hidden_layers)]

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data, as config.json has it, of a model without multi-token prediction."""
        data = super().to_dict()
        if self.sliding_window is not None:
            data["sliding_window"] -= 1
        return data | {"num_nextn_predict_layers": 0}


class StreamGates(nn.Module):
    """The gates that connect a sublayer to the residual streams [B, T, E, D], computed in float32."""

    def __init__(self, config: Motif3Config) -> None:
        super().__init__()
        streams = config.mhc_expansion_rate
        width = streams * config.hidden_size
        self.rounds, self.largest_write = config.mhc_sinkhorn_iters, 1 + config.mhc_h_post_alpha_end
        self.rms_norm = LlamaRMSNorm(width, _EPS)
        for name, shape in (("pre", (streams,)), ("post", (streams,)), ("res", (streams, streams))):
            # Not a Linear, which config.json would have to list as unpacked.
            weight = nn.Parameter(config.initializer_range * torch.randn(math.prod(shape), width))
            self.add_module(f"proj_{name}", nn.ParameterDict({"weight": weight}))
            self.register_parameter(f"alpha_{name}", nn.Parameter(torch.zeros(1)))
            self.register_parameter(f"bias_{name}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sublayer's input [B, T, D], the mixed streams [B, T, E, D] and its output's factors [B, T, E]."""
        wide = x.float()
        n = self.rms_norm(wide.flatten(-2))
        reads = self._gate("pre", n, _LARGEST_GATE).sigmoid()
        writes = self._gate("post", n, _LARGEST_GATE).sigmoid() * self.largest_write
        mix = self._gate("res", n, _LARGEST_MIX).exp()
        for _ in range(self.rounds):
            mix = mix / mix.sum(-1, keepdim=True).clamp(min=_SMALLEST_SUM)
            mix = mix / mix.sum(-2, keepdim=True).clamp(min=_SMALLEST_SUM)
        return (reads[..., None] * wide).sum(-2).to(x.dtype), mix @ wide, writes

    def _gate(self, name: str, n: Tensor, largest: float) -> Tensor:
        names = (f"proj_{name}.weight", f"alpha_{name}", f"bias_{name}")
        weight, alpha, bias = (self.get_parameter(each).float() for each in names)
        return (alpha * linear(n, weight).unflatten(-1, bias.shape) + bias).clamp(-largest, largest)


def add_to_streams(mixed: Tensor, y: Tensor, writes: Tensor) -> Tensor:
    """Add a sublayer's output y [B, T, D], times its factors, to the mixed streams; return them in y's dtype."""
    return (mixed + writes[..., None] * y.float()[..., None, :]).to(y.dtype)


class Motif3Attention(nn.Module):
    """Grouped differential attention over keys and values from a latent, all of them or a window's."""

    def __init__(self, config: Motif3Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.layer_type = config, layer_idx, config.layer_types[layer_idx]
        self.groups, self.value_width = config.num_key_value_heads, config.v_head_dim
        # Widths of a head's channels without and with positions; of a token's latent and its keys with positions.
        self.key_widths = [config.head_dim - config.qk_rope_head_dim, config.qk_rope_head_dim]
        self.latent_widths = [config.kv_lora_rank, config.qk_rope_head_dim]
        is_stretched = self.layer_type == _FULL and config.max_position_embeddings > config.original_seq_len
        stretch = 0.1 * config.mscale * math.log(config.rope_factor) + 1 if is_stretched else 1.0
        # Attributes that attention functions read.
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5 * stretch**2
        self.num_key_value_groups = config.num_attention_heads // self.groups
        self.attention_dropout, self.is_causal = 0.0, True
        width, signals = config.hidden_size, config.num_attention_heads - config.num_noise_heads
        self.wq_a = nn.Linear(width, config.q_lora_rank, bias=False)
        self.q_norm = LlamaRMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = nn.Linear(config.q_lora_rank, config.num_attention_heads * config.head_dim, bias=False)
        self.wq_b_gate = nn.Linear(config.q_lora_rank, signals * self.value_width, bias=False)
        self.wkv_a = nn.Linear(width, sum(self.latent_widths), bias=False)
        self.kv_norm = LlamaRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.wkv_b = nn.Linear(config.kv_lora_rank, self.groups * (self.key_widths[0] + self.value_width), bias=False)
        self.lambda_proj = nn.Linear(width, signals, bias=False)
        self.wo = nn.Linear(signals * self.value_width, width, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, Rotary],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query_latent = self.q_norm(self.wq_a(hidden_states))
        queries = self.wq_b(query_latent).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        latent, turned_keys = self.wkv_a(hidden_states).split(self.latent_widths, -1)
        pairs = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        keys, values = pairs.split([self.key_widths[0], self.value_width], -1)
        queries, turned = queries.split(self.key_widths, -1)
        # One key's channels with positions serve all heads.
        turned, turned_keys = apply_rotary_pos_emb(turned, turned_keys[:, None], *position_embeddings[self.layer_type])
        queries = torch.cat([queries, turned], -1)
        keys = torch.cat([keys, turned_keys.expand(-1, self.groups, -1, -1)], -1)
        # transformers 5.24 calls `cache` what was `past_key_values`.
        cache = past_key_values if cache is None else cache
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads, weights = attend(
            self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        # A group's noise head follows its signal heads.
        groups = heads.float().reshape(*hidden_states.shape[:-1], self.groups, -1, self.value_width)
        gates = self.lambda_proj(hidden_states).float().sigmoid().unflatten(-1, (self.groups, -1))[..., None]
        out = (groups[..., :-1, :] - gates * groups[..., -1:, :]).to(hidden_states.dtype).flatten(-3)
        return self.wo(out * self.wq_b_gate(query_latent).sigmoid()), weights


class PolyNorm(nn.Module):
    """w0·n(x³) + w1·n(x²) + w2·n(x) + b, where n(z) = z / √(mean(z²) + 1e-6) over the last axis; x is float32.

    Several experts have separate parameters, and their biases are limited.
    """

    def __init__(self, config: Motif3Config, *experts: int) -> None:
        super().__init__()
        self.has_sigmoids = config.polynorm_sigmoid_weight
        self.largest_bias = config.polynorm_bias_clamp if experts else None
        self.weight, self.bias = (nn.Parameter(torch.zeros(*experts, width)) for width in (3, 1))

    def forward(self, x: Tensor, expert: Any = ...) -> Tensor:
        weight, bias = self.weight[expert].float(), self.bias[expert].float()
        weight = weight.sigmoid() if self.has_sigmoids else weight
        bias = bias if self.largest_bias is None else bias.clamp(-self.largest_bias, self.largest_bias)
        powers = torch.stack([x**3, x**2, x])
        normed = powers * torch.rsqrt(powers.square().mean(-1, keepdim=True) + _EPS)
        return torch.einsum("p,p...->...", weight, normed) + bias


class PolyMLP(nn.Module):
    """A gated MLP with PolyNorm: that of a dense layer, or the expert of all tokens."""

    def __init__(self, config: Motif3Config, inner: int, scale: float) -> None:
        super().__init__()
        self.scale, self.clamp = scale, config.hidden_clamp
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.act_fn = PolyNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (part(x).float().clamp(-self.clamp, self.clamp) for part in (self.gate_proj, self.up_proj))
        return self.down_proj((self.act_fn(gate) * up).to(x.dtype) * self.scale)


def find_scheme(config: Motif3Config, module: str) -> Any:
    """Return the scheme, with its format, in which compressed-tensors stores a module's weight, or None if unpacked."""
    packing = getattr(getattr(config, "quantization_config", None), "quantization_config", None)
    if packing is None:
        return None
    from compressed_tensors.utils import match_name

    for scheme in packing.config_groups.values():
        if any(match_name(module, target) for target in scheme.targets):
            return scheme.model_copy(update={"format": scheme.format or packing.format})
    return None


class PackedExperts(nn.Module):
    """A weight of each expert, [experts, out, in], stored as compressed-tensors stores one; the index decodes it."""

    def __init__(self, shape: tuple[int, int, int], scheme: Any) -> None:
        super().__init__()
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import initialize_module_for_quantization

        self.scheme, self.compressor = scheme, BaseCompressor.get_value_from_registry(scheme.format)
        one = nn.Linear(shape[2], shape[1], bias=False, device="meta")
        initialize_module_for_quantization(one, scheme, force_zero_point=False)
        for name, part in self.compressor.compress(dict(one.named_parameters()), scheme).items():
            # One of each per expert; the tensor scale and the shape, three numbers, are shared.
            stored = (3,) if name == "weight_shape" else (shape[0], *part.shape) if part.ndim == 2 else part.shape
            self.register_parameter(name, nn.Parameter(torch.empty(stored, dtype=part.dtype), requires_grad=False))

    def __setattr__(self, name: str, value: Any) -> None:
        # compressed-tensors 0.17 sets this on every module that a pattern matches, and initializes it as a Linear.
        if name != "quantization_scheme":
            super().__setattr__(name, value)

    def __getitem__(self, expert: int) -> Tensor:
        parts = {name: part[expert] if part.ndim == 3 else part[-2:] for name, part in self.named_parameters()}
        return self.compressor.decompress(parts, self.scheme)["weight"]


class Experts(nn.Module):
    """The experts that tokens are routed to; the rows of a gate lie before those of its up projection."""

    gate_up_proj: Any
    down_proj: Any

    def __init__(self, config: Motif3Config, layer: int, scale: float) -> None:
        super().__init__()
        self.scale, self.clamp = scale, config.hidden_clamp
        width, inner = config.hidden_size, config.moe_intermediate_size
        for name, rows, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            shape = config.num_experts, rows, columns
            if scheme := find_scheme(config, f"model.layers.{layer}.moe.experts.{name}"):
                self.add_module(name, PackedExperts(shape, scheme))
            else:
                self.register_parameter(name, nn.Parameter(config.initializer_range * torch.randn(shape)))
        self.act_fn = PolyNorm(config, config.num_experts)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        gate, up = linear(x, self.gate_up_proj[expert].to(x.dtype)).float().chunk(2, -1)
        product = (self.act_fn(gate, expert) * up).clamp(-self.clamp, self.clamp)
        return linear(product.to(x.dtype) * self.scale, self.down_proj[expert].to(x.dtype))


class MixtureOfExperts(nn.Module):
    """The outputs of a token's experts times their shares, plus that of the expert of all tokens.

    Experts are chosen by the sigmoid of their logit plus a bias; shares exclude the bias.
    """

    def __init__(self, config: Motif3Config, layer: int, scale: float) -> None:
        super().__init__()
        self.chosen, self.is_normed = config.experts_top_k, config.route_norm
        self.route_scale = config.route_scale
        self.router = nn.ModuleDict({"gate": nn.Linear(config.hidden_size, config.num_experts, bias=False)})
        is_biased = config.load_balance_coeff is not None
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts)) if is_biased else None
        self.experts = Experts(config, layer, scale)
        self.shared_experts = PolyMLP(config, config.moe_intermediate_size, scale)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = linear(tokens.float(), self.get_parameter("router.gate.weight").float()).sigmoid()
        chosen = (scores if self.expert_bias is None else scores + self.expert_bias.float()).topk(self.chosen).indices
        shares = scores.gather(1, chosen)
        if self.is_normed:
            shares = shares / (shares.sum(1, keepdim=True) + _SMALLEST_SHARE)
        routed = torch.zeros_like(tokens, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            y = self.experts(tokens[rows], expert).float()
            routed = routed.index_add(0, rows, y * shares[rows, places, None] * self.route_scale)
        return routed.to(x.dtype).view_as(x) + self.shared_experts(x)


class Motif3Layer(GradientCheckpointingLayer):
    """Attention and a network, each between gates that read the residual streams and write to them."""

    def __init__(self, config: Motif3Config, layer: int) -> None:
        super().__init__()
        self.streams = config.mhc_expansion_rate
        self.mhc_attn, self.mhc_ffn = StreamGates(config), StreamGates(config)
        self.self_attn = Motif3Attention(config, layer)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        scale = config.polynorm_output_scale_per_layer.get(str(layer), config.polynorm_output_scale)
        is_dense = layer < config.n_dense_first_layers or (layer + 1) % config.interleave_moe_layer_step
        self.network = "mlp" if is_dense else "moe"
        if is_dense:
            self.mlp = PolyMLP(config, config.intermediate_size, scale)
        else:
            self.moe = MixtureOfExperts(config, layer, scale)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the streams [B, T, E, D]; the first layer gets embeddings [B, T, D], which each stream begins with."""
        x = hidden_states
        x = x if x.ndim == 4 else x.unsqueeze(-2).expand(-1, -1, self.streams, -1)
        read, mixed, writes = self.mhc_attn(x)
        x = add_to_streams(mixed, self.self_attn(self.input_layernorm(read), **kwargs)[0], writes)
        read, mixed, writes = self.mhc_ffn(x)
        return add_to_streams(mixed, getattr(self, self.network)(self.post_attention_layernorm(read)), writes)


class MeanNorm(LlamaRMSNorm):
    """The final norm, of the mean of the residual streams."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.mean(-2))


class Rotaries(nn.ModuleDict):
    """Rotary embeddings of both types of layers: windowed ones have plain angles."""

    def __init__(self, config: Motif3Config) -> None:
        super().__init__()
        plain = {"rope_type": "default", "rope_theta": config.swa_rope_theta}
        for layer_type, rope in ((_FULL, config.rope_parameters), (_WINDOWED, plain)):
            own = copy(config)
            # Cosines and sines are not scaled, but logits are.
            own.head_dim, own.rope_parameters = config.qk_rope_head_dim, dict(rope or {}, attention_factor=1.0)
            self[layer_type] = LlamaRotaryEmbedding(own)

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[str, Rotary]:
        return {layer_type: rotary(x, position_ids) for layer_type, rotary in self.items()}


class Motif3PreTrainedModel(Qwen2PreTrainedModel):
    """What both models declare to transformers."""

    config_class = Motif3Config
    # Values are narrower than keys, and experts depend on data.
    _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = _can_compile_fullgraph = False
    _no_split_modules = ["Motif3Layer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Motif3Layer, "attentions": Motif3Attention}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["mhc_attn", "mhc_ffn", "router", "expert_bias", "act_fn"]  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"\.mtp_layers\."]  # noqa: RUF012


class Motif3Model(Motif3PreTrainedModel, Qwen2Model):
    """The decoder without its output head, whose forward is that of any decoder with windowed layers."""

    def __init__(self, config: Motif3Config) -> None:
        super(Qwen2Model, self).__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Motif3Layer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm, self.rotary_emb = MeanNorm(config.hidden_size, config.rms_norm_eps), Rotaries(config)
        self.has_sliding_layers, self.gradient_checkpointing = _WINDOWED in config.layer_types, False
        self.post_init()


class Motif3ForCausalLM(Motif3PreTrainedModel, Qwen2ForCausalLM):
    """A causal language model with latents, experts and residual streams."""

    def __init__(self, config: Motif3Config) -> None:
        super(Qwen2ForCausalLM, self).__init__(config)
        self.model = Motif3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        recipe = (getattr(config, "diffquant_config", None) or {}).get("recipe", {})
        asked = {name: recipe[name] for name in ("k", "v", "logits", "qk", "p", "pv") if recipe.get(name, "16") != "16"}
        if asked:
            schemes = ", ".join(f"{name} {scheme}" for name, scheme in asked.items())
            dtype = str(self.dtype).removeprefix("torch.")
            logging.get_logger(__name__).warning(_NOT_HERE.format(schemes, dtype))
