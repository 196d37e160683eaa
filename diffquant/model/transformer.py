"""The architecture that `DiffTransformer` runs: every layer has attention and a gated network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diffquant.model.architecture import Architecture
from diffquant.model.blocks import AttentionBlock, Block, Blocks, MLPBlock, RMSNormBlock

# Defaults of a config.json of our own.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class TransformerArchitecture(Architecture):
    """A Transformer of this family, plain ones included.

    Attributes:
        rope_parameters: rotary settings as transformers standardizes them: "rope_type", "rope_theta" and what else
            the type takes.
    """

    model = "diffquant.model.modeling:DiffTransformer"

    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]

    @cached_property
    def layers(self) -> Sequence[Blocks]:
        norm = self.final_norm[1]
        return [
            {
                "self_attn": AttentionBlock(layer, self.diff_spec, self.hidden_size, self.attention_bias),
                "mlp": self.network(layer),
                "input_layernorm": norm,
                "post_attention_layernorm": norm,
            }
            for layer in range(self.num_hidden_layers)
        ]

    def network(self, layer: int) -> Block:  # noqa: ARG002  all are alike, unless an architecture says otherwise
        """The network of a 0-based layer."""
        return MLPBlock(self.hidden_size, self.intermediate_size, self.hidden_act, self.mlp_bias)

    @property
    def final_norm(self) -> tuple[str, Block]:
        return "norm", RMSNormBlock(self.hidden_size, self.rms_norm_eps)
