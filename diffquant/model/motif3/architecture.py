"""The architecture that `Motif3` runs, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Block, Blocks, Parameters, RMSNormBlock, below
from diffquant.model.motif3.blocks import (
    ExpertsBlock,
    LatentAttentionBlock,
    PolyMLPBlock,
    PolySettings,
    StreamsBlock,
    predicted_parameters,
)
from diffquant.model.motif3.rotary import plain_frequencies, yarn_factor, yarn_frequencies


@dataclass(frozen=True, kw_only=True)
class Motif3Architecture(Architecture):
    """A decoder of latent attention, whole or over windows, and experts between residual streams.

    Its settings have the names of config.json, rotary ones those of transformers.
    """

    model = "diffquant.model.motif3.modeling:Motif3"
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
        streams = StreamsBlock(
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
    def carried(self) -> Parameters:
        attention = self._attention(0, self.seen)
        network = self._dense(self._poly(0), self.intermediate_size)
        predicted = predicted_parameters(attention, network, self.final_norm[1])
        layers = [below(f"model.mtp_layers.{i}", predicted) for i in range(self.num_nextn_predict_layers)]
        return {name: each for layer in layers for name, each in layer.items()}

    @property
    def seen(self) -> int | None:
        """Number of newest tokens that a windowed layer sees; a configuration counts those before the newest."""
        return None if self.sliding_window is None else self.sliding_window + 1

    def _window(self, layer: int) -> int | None:
        return None if layer % self.sliding_window_period == 0 else self.seen

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
