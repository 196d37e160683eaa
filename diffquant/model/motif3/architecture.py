"""The architecture of `Motif3` as plain data, and the angles of its rotary embedding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Block, Blocks, Parameters, RMSNormBlock, prefix_names
from diffquant.model.motif3.blocks import (
    ExpertsBlock,
    LatentAttentionBlock,
    PolyMLPBlock,
    PolySettings,
    StreamGatesBlock,
    mtp_parameters,
)
from diffquant.recipe.numbers.absmax import computing_dtype


def plain_frequencies(width: int, theta: float) -> list[float]:
    """Compute RoPE angles per position, θ^(-2j/width), for each of the width/2 pairs of channels."""
    return [theta ** (-2 * j / width) for j in range(width // 2)]


def yarn_frequencies(width: int, theta: float, settings: Mapping[str, Any]) -> list[float]:
    """Compute YaRN angles per position: those of slowly rotating channels are divided by a factor.

    Args:
        settings: "factor"; "original_max_position_embeddings", the context length before extension; "beta_fast" and
            "beta_slow". Channels with more than beta_fast rotations over that length keep their angle; those with less
            than beta_slow have it divided; in between, angles are interpolated.

    Source: YaRN, arXiv 2309.00071, section 3.2.
    """
    factor, original = settings["factor"], settings["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(channel(settings.get("beta_fast") or 32)), 0)
    high = min(math.ceil(channel(settings.get("beta_slow") or 1)), width - 1)
    divided = [min(max((j - low) / max(high - low, 0.001), 0.0), 1.0) for j in range(width // 2)]
    plain = plain_frequencies(width, theta)
    return [f * (1 - share) + f / factor * share for f, share in zip(plain, divided, strict=True)]


def yarn_factor(factor: float, mscale: float) -> float:
    """Compute the factor 0.1·mscale·ln(factor) + 1 by which YaRN multiplies queries, and also keys.

    Here `factor` is the ratio of the extended context length to the original one.
    """
    return 0.1 * mscale * math.log(factor) + 1


def rotary_tables(positions: Tensor, frequencies: Sequence[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute RoPE cosines and sines [B or 1, T, width] of positions [B or 1, T], in the dtype of `like`."""
    wide = computing_dtype(like)
    angles = positions[..., None].to(wide) * torch.tensor(frequencies, dtype=wide, device=positions.device)
    both = torch.cat([angles, angles], -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


@dataclass(frozen=True, kw_only=True)
class Motif3Architecture(Architecture):
    """A decoder with latent attention, full or windowed, mixture-of-experts layers and several residual streams.

    Fields are named as in Motif-3's config.json, rotary settings as in transformers.
    """

    model = "diffquant.model.motif3.modeling:Motif3"
    export = "diffquant.onnx.architectures.motif3:Motif3Decoder"
    served = "diffquant.serving.vllm.motif3:Motif3ForCausalLM"
    modelling_file = "modeling_motif3.py"
    makers_pack_experts = True

    rms_norm_eps: float
    num_noise_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    num_experts: int
    experts_top_k: int
    n_dense_first_layers: int
    interleave_moe_layer_step: int
    route_norm: bool
    route_scale: float
    load_balance_coeff: float | None
    polynorm_output_scale: float
    polynorm_output_scale_per_layer: Mapping[str, float]
    polynorm_bias_clamp: float | None
    polynorm_sigmoid_weight: bool
    hidden_clamp: float
    mhc_expansion_rate: int
    mhc_sinkhorn_iters: int
    mhc_h_post_alpha_end: float
    sliding_window: int | None
    sliding_window_period: int
    rope_parameters: Mapping[str, Any]
    swa_rope_theta: float
    original_seq_len: int
    rope_factor: float
    mscale: float
    num_nextn_predict_layers: int

    @cached_property
    def layers(self) -> Sequence[Blocks]:
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), self.final_norm[1])
        streams = StreamGatesBlock(
            self.hidden_size, self.mhc_expansion_rate, self.mhc_sinkhorn_iters, 1 + self.mhc_h_post_alpha_end
        )
        return [
            {
                "self_attn": self._attention(layer, self._window(layer)),
                **self._network(layer),
                **norms,
                "mhc_attn": streams,
                "mhc_ffn": streams,
            }
            for layer in range(self.num_hidden_layers)
        ]

    @property
    def final_norm(self) -> tuple[str, RMSNormBlock]:
        return "norm", RMSNormBlock(self.hidden_size, self.rms_norm_eps)

    @cached_property
    def unused_parameters(self) -> Parameters:
        attention = self._attention(0, self.window)
        network = self._dense(self._poly(0), self.intermediate_size)
        predicted = mtp_parameters(attention, network, self.final_norm[1])
        layers = [prefix_names(f"model.mtp_layers.{i}", predicted) for i in range(self.num_nextn_predict_layers)]
        return {name: each for layer in layers for name, each in layer.items()}

    @property
    def window(self) -> int | None:
        """Number of newest tokens that a windowed layer sees, or None if there is no window.

        It is one more than config.json's `sliding_window`.
        """
        return None if self.sliding_window is None else self.sliding_window + 1

    def _window(self, layer: int) -> int | None:
        return None if layer % self.sliding_window_period == 0 else self.window

    def _attention(self, layer: int, window: int | None) -> LatentAttentionBlock:
        width, is_whole = self.qk_rope_head_dim, window is None
        theta = self.rope_parameters["rope_theta"] if is_whole else self.swa_rope_theta
        if is_whole and self.rope_parameters["rope_type"] == "yarn":
            frequencies = yarn_frequencies(width, theta, self.rope_parameters)
        else:
            frequencies = plain_frequencies(width, theta)
        is_stretched = is_whole and self.max_position_embeddings > self.original_seq_len
        return LatentAttentionBlock(
            layer,
            self.diff_spec,
            self.hidden_size,
            self.q_lora_rank,
            self.kv_lora_rank,
            width,
            self.rms_norm_eps,
            tuple(frequencies),
            yarn_factor(self.rope_factor, self.mscale) ** 2 if is_stretched else 1.0,
            window,
        )

    def _network(self, layer: int) -> dict[str, Block]:
        poly = self._poly(layer)
        if layer < self.n_dense_first_layers or (layer + 1) % self.interleave_moe_layer_step:
            return {"mlp": self._dense(poly, self.intermediate_size)}
        experts = ExpertsBlock(
            self.hidden_size,
            self.moe_intermediate_size,
            self.num_experts,
            self.experts_top_k,
            self.route_scale,
            self.route_norm,
            self.load_balance_coeff is not None,
            poly,
            self._dense(poly, self.moe_intermediate_size),
        )
        return {"moe": experts}

    def _dense(self, poly: PolySettings, inner: int) -> PolyMLPBlock:
        return PolyMLPBlock(self.hidden_size, inner, self.hidden_act, poly=replace(poly, bias_clamp=None))

    def _poly(self, layer: int) -> PolySettings:
        scale = self.polynorm_output_scale_per_layer.get(str(layer), self.polynorm_output_scale)
        return PolySettings(scale, self.hidden_clamp, self.polynorm_bias_clamp, self.polynorm_sigmoid_weight)
