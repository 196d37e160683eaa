# SPDX-License-Identifier: Apache-2.0
"""Differential attention for transformers, and for engines that run transformers' models. It does not need diffquant.

Each map of differential attention is an ordinary softmax. So each layer calls the attention interface with plain heads
and subtracts the results: softmax(Q1·K1ᵀ)·V - λ·softmax(Q2·K2ᵀ)·V. If each map has separate keys, the two keys of a
pair are stored as one key head, K1|K2, and queries have zeros in place of the other map's half: (Q1|0)·(K1|K2)ᵀ is
Q1·K1ᵀ. So nothing is stored twice, and V1's values, as wide as two keys, have the same width as a key head. Values that
are wider than a key head are cut into several heads, which use the same map. The entry `diff_model` of config.json
describes the kind of attention. The numbers of heads in the configuration are those of the plain heads.

Sources: arXiv 2410.05258, section 2; microsoft/unilm, Diff-Transformer and Diff-Transformer-V2.
"""

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel, LlamaRMSNorm, eager_attention_forward
from transformers.utils import logging

MODEL_TYPE = "diff_transformer"
_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_STATED = ("num_attention_heads", "num_key_value_heads", "head_dim")
_ROTARY = ("rope_theta", "rope_scaling", "rope_angles")
# transformers 5.24 calls `cache` what was `past_key_values`. Before, `cache` are the pages of its continuous batching,
# which its attention fills itself.
_IS_RENAMED = "cache" in BaseModelOutputWithPast.__dataclass_fields__
Rotary = tuple[Tensor, Tensor]
_NOT_HERE = "{} of the recipe are not applied here: this model keeps them in {}; diffquant.load applies them"


class DiffConfig(PreTrainedConfig):
    """A model's sizes under Llama's names, from `diff_model`; the numbers of heads are those of the plain heads."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        **{f"layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "lambda_proj")},
        **{f"layers.*.self_attn.{name}": "rowwise" for name in ("o_proj", "out_proj")},
        "layers.*.self_attn.output_gate_proj": "colwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    initializer_range: float = 0.02
    use_cache: bool = True
    pretraining_tp: int = 1
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    diff_model: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        settled = {name: value for name, value in (self.diff_model or {}).items() if name != "attention"}
        for name, value in settled.items():
            setattr(self, name, dict(value) if isinstance(value, dict) else value)
        self.settled_here = [name for name in settled if name not in kwargs and name not in self.__dataclass_fields__]
        # `diff_model` also replaces the rotary settings of the checkpoint's format.
        super().__post_init__(**{name: value for name, value in kwargs.items() if name not in (*settled, *_ROTARY)})
        if self.diff_model is not None:
            heads = PlainHeads(self.diff_model["attention"])
            self.head_dim = heads.width
            self.num_key_value_heads = heads.kv_pairs * heads.cuts
            self.num_attention_heads = self.num_key_value_heads * heads.group
            # Sharding columns would separate the maps of a pair if a projection has all signal heads first, and
            # would split the gate, over which PolyNorm takes means.
            if heads.are_in_halves or self.hidden_act == "poly_norm":
                self.base_model_tp_plan = None

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data, with the names and numbers of heads of the checkpoint's format."""
        data = super().to_dict()
        stated = {name: self.diff_model[name] for name in _STATED if self.diff_model}
        dropped = {"settled_here", *data.pop("settled_here", ())}
        return {name: value for name, value in data.items() if name not in dropped} | stated


# Llama's MLP finds its activation in ACT2FN; checkpoints store the parameters under mlp.act_fn.
class PolyNorm(nn.Module):
    """w0·n(x³) + w1·n(x²) + w2·n(x) + b, where n(z) = z / √(mean(z²) + 1e-6) over the last axis (arXiv 2411.03884)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        powers = torch.stack([wide**3, wide**2, wide])
        normed = powers * torch.rsqrt(powers.square().mean(-1, keepdim=True) + 1e-6)
        return (torch.einsum("p,p...->...", self.weight.float(), normed) + self.bias.float()).to(x.dtype)


ACT2FN["poly_norm"] = PolyNorm


class PlainHeads:
    """Converts projected queries, keys and values to plain heads, which any engine supports, and outputs to pairs.

    K is the number of KV pairs, P the number of signal heads, and d the width of a projected query. A pair has m key
    heads (2, or 1 if both maps share keys), and w = m·d is the width of a plain head. A value is cut into c plain
    heads, each of which is used by u query heads. Numbers of heads are read from tensors, because a tensor-parallel
    rank has only some of the heads.
    """

    def __init__(self, attention: dict[str, Any]) -> None:
        self.key_width, self.value_width = attention["head_dim"], attention["value_dim"]
        self.pairs, self.kv_pairs = attention["pairs"], attention["kv_pairs"]
        self.has_noise = attention["maps"] == 2
        self.sharing = attention["signals_per_noise"]
        self.are_in_halves = self.has_noise and attention["head_order"] == "halves"
        self.key_maps = 2 if self.has_noise and not attention["shared_k"] else 1
        self.repeats = attention["kv_repeats"]
        self.is_interleaved = attention["rope"] == "interleaved"
        self.is_rotated = attention["rope"] != "none"
        self.width = self.key_maps * self.key_width
        self.cuts = math.ceil(self.value_width / self.width)
        self.signals = self.pairs // self.kv_pairs
        self.noises = self.signals // self.sharing if self.has_noise else 0
        self.group = self.signals + self.noises

    def queries(self, projected: Tensor, rotary: Rotary) -> Tensor:
        """Convert projected queries [B, T, rows] to plain heads [B, K·c·u, T, w]; rotary is cos and sin [B, T, d]."""
        heads = self._rotate(projected.unflatten(-1, (-1, self.key_width)), rotary)
        signal, noise = self._maps(heads, self.sharing if self.has_noise else 0)
        if noise is not None and self.key_maps == 2:
            signal, noise = pad(signal, (0, self.key_width)), pad(noise, (self.key_width, 0))
        kv_pairs = signal.shape[-2] // self.signals
        groups = signal.unflatten(-2, (kv_pairs, self.signals))
        if noise is not None:
            groups = torch.cat([groups, noise.unflatten(-2, (kv_pairs, self.noises))], 3)
        # Queries are repeated for each cut of the values.
        return groups.unsqueeze(3).expand(-1, -1, -1, self.cuts, -1, -1).flatten(2, 4).transpose(1, 2)

    def keys(self, projected: Tensor, rotary: Rotary) -> Tensor:
        """Convert projected keys [B, S, rows] to plain heads [B, K·c, S, w]."""
        heads = self._rotate(projected.unflatten(-1, (-1, self.key_width)), rotary).repeat_interleave(self.repeats, -2)
        if self.key_maps == 2:
            signal, noise = self._maps(heads, 1)
            heads = torch.cat([signal, noise], -1)
        return heads.repeat_interleave(self.cuts, 2).transpose(1, 2)

    def values(self, projected: Tensor) -> Tensor:
        """Convert projected values [B, S, rows] to plain heads [B, K·c, S, w]; the last cut is padded with zeros."""
        if self.are_in_halves:
            values = projected.unflatten(-1, (2, -1, self.value_width // 2)).transpose(2, 3).flatten(-2)
        else:
            values = projected.unflatten(-1, (-1, self.value_width)).repeat_interleave(self.repeats, -2)
        filled = pad(values, (0, self.cuts * self.width - self.value_width))
        return filled.unflatten(-1, (self.cuts, self.width)).flatten(2, 3).transpose(1, 2)

    def outputs(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Convert the heads' outputs [B, T, H·w] to signal and noise [B, T, P, dv]; noise is None with one map."""
        cuts = heads.unflatten(-1, (-1, self.cuts, self.group, self.width))
        pairs = cuts.transpose(3, 4).flatten(-2)[..., : self.value_width]
        signal, noise = pairs.split([self.signals, self.noises], 3)
        if not self.has_noise:
            return signal.flatten(2, 3), None
        return signal.flatten(2, 3), noise.flatten(2, 3).repeat_interleave(self.sharing, 2)

    def _maps(self, heads: Tensor, sharing: int) -> tuple[Tensor, Tensor | None]:
        """Split heads into signal and noise heads [B, T, ·, d]; `sharing` signal heads share one noise head."""
        if not sharing:
            return heads, None
        if self.are_in_halves:
            return heads.split([heads.shape[2] * sharing // (sharing + 1), heads.shape[2] // (sharing + 1)], 2)
        groups = heads.unflatten(2, (-1, sharing + 1))
        return groups[:, :, :, :sharing].flatten(2, 3), groups[:, :, :, sharing]

    def _rotate(self, heads: Tensor, rotary: Rotary) -> Tensor:
        if not self.is_rotated:
            return heads
        half = self.key_width // 2
        cos, sin = (table[:, :, None, :half] for table in rotary)
        if self.is_interleaved:
            real, imaginary = heads[..., 0::2], heads[..., 1::2]
            return torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
        real, imaginary = heads[..., :half], heads[..., half:]
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


class DiffAttention(nn.Module):
    """Differential attention of a layer, from its Q, K and V projections to its output projection."""

    def __init__(self, config: DiffConfig, layer_idx: int) -> None:
        super().__init__()
        spec = config.diff_model["attention"]
        self.config, self.layer_idx, self.spec = config, layer_idx, spec
        self.heads = PlainHeads(spec)
        # Attributes that attention functions read.
        self.head_dim, self.scaling = self.heads.width, self.heads.key_width**-0.5
        self.num_key_value_groups, self.attention_dropout, self.is_causal = self.heads.group, 0.0, True
        width, bias, heads = config.hidden_size, config.attention_bias, self.heads
        noises = heads.pairs // heads.sharing if heads.has_noise else 0
        stored = heads.kv_pairs // heads.repeats
        self.q_proj = nn.Linear(width, (heads.pairs + noises) * heads.key_width, bias=bias)
        self.k_proj = nn.Linear(width, stored * heads.width, bias=bias)
        self.v_proj = nn.Linear(width, stored * heads.value_width, bias=bias)
        self.add_module(spec["output"], nn.Linear(heads.pairs * heads.value_width, width, bias=bias))
        if spec["lam"] == "exp":
            for name in _VECTORS:
                # Initialized as in the paper; vectors of zeros would have no gradient.
                self.register_parameter(name, nn.Parameter(0.1 * torch.randn(heads.key_width)))
        elif heads.has_noise:
            self.lambda_proj = nn.Linear(width, heads.pairs * (2 if spec["lam"] == "two-gates" else 1), bias=False)
        if spec["output_gate"]:
            self.output_gate_proj = nn.Linear(width, heads.pairs * heads.value_width, bias=False)
        if spec["post_norm"] == "affine":
            self.subln = LlamaRMSNorm(heads.value_width, spec["post_norm_eps"])
        self.lam_init = 0.8 - 0.6 * math.exp(-0.3 * (layer_idx + spec["lam_init_offset"]))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries = self.heads.queries(self.q_proj(hidden_states), position_embeddings)
        keys = self.heads.keys(self.k_proj(hidden_states), position_embeddings)
        values = self.heads.values(self.v_proj(hidden_states))
        cache = kwargs.pop("cache", None) if _IS_RENAMED else None
        if past_key_values is not None:
            if cache is not None:
                # compressed-tensors rounds keys and values for a `kv_cache_scheme` and passes them on to a cache, which
                # it finds only under the older name.
                past_key_values.add_past_key_values(cache)
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        elif cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx, kwargs=kwargs)
        # Engines look for this call, by this name, to put their own attention in its place.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        heads, weights = attend(
            self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        heads = heads.reshape(*hidden_states.shape[:-1], -1)
        signal, noise = self.heads.outputs(heads)
        out = self._normalize(self._difference(signal, noise, hidden_states)).flatten(-2)
        if self.spec["output_gate"]:
            out = out * self.output_gate_proj(hidden_states).sigmoid()
        return getattr(self, self.spec["output"])(out), weights

    def _difference(self, signal: Tensor, noise: Tensor | None, hidden_states: Tensor) -> Tensor:
        """Return signal - λ·noise, each [B, T, P, dv]; λ and the difference are computed in float32."""
        if noise is None:
            return signal
        if self.spec["lam"] == "exp":
            q1, k1, q2, k2 = (getattr(self, name).float() for name in _VECTORS)
            # Under autocast products of vectors would be bfloat16's.
            lam = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lam_init
            return (signal.float() - lam * noise.float()).to(signal.dtype)
        gates = self.lambda_proj(hidden_states).float().sigmoid()
        if self.spec["lam"] == "two-gates":
            gates = gates.unflatten(-1, (-1, 2))
            return (gates[..., :1] * signal.float() - gates[..., 1:] * noise.float()).to(signal.dtype)
        return (signal.float() - gates.unsqueeze(-1) * noise.float()).to(signal.dtype)

    def _normalize(self, pairs: Tensor) -> Tensor:
        """Apply RMSNorm over a pair's channels and multiply by 1 - λ_init, each if the model has it."""
        if self.spec["post_norm"] == "none":
            return pairs
        if self.spec["post_norm"] == "affine":
            normed = self.subln(pairs)
        else:
            wide = pairs.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec["post_norm_eps"])
            normed = normed.to(pairs.dtype)
        return normed * (1 - self.lam_init) if self.spec["scale_by_init"] else normed


class DiffModel(LlamaModel):
    """Llama's decoder around differential attention."""

    config_class = DiffConfig
    _can_record_outputs = LlamaModel._can_record_outputs | {"attentions": DiffAttention}

    def __init__(self, config: DiffConfig) -> None:
        # Llama computes angles for heads of `head_dim`, but the rotated part of a plain head can be narrower.
        width, config.head_dim = config.head_dim, PlainHeads(config.diff_model["attention"]).key_width
        super().__init__(config)
        self.rotary_emb.config = copy(config)
        config.head_dim = width
        for index, layer in enumerate(self.layers):
            layer.self_attn = DiffAttention(config, index)
        self.post_init()


class DiffForCausalLM(LlamaForCausalLM):
    """A causal language model of the family."""

    config_class = DiffConfig

    def __init__(self, config: DiffConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = DiffModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        recipe = (getattr(config, "diffquant_config", None) or {}).get("recipe", {})
        packing = getattr(config, "quantization_config", None) or {}
        packing = packing if isinstance(packing, dict) else packing.to_dict()
        cache = () if packing.get("kv_cache_scheme") else ("k", "v")
        asked = {name: recipe[name] for name in (*cache, "logits", "qk", "p", "pv") if recipe.get(name, "16") != "16"}
        if asked:
            schemes = ", ".join(f"{name} {scheme}" for name, scheme in asked.items())
            dtype = str(self.dtype).removeprefix("torch.")
            logging.get_logger(__name__).warning(_NOT_HERE.format(schemes, dtype))
