"""A model's architecture as plain data: importing transformers takes longer than most work on checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only model, as Llama names them, and the `DiffSpec` of its attention.

    Attributes:
        rope_parameters: rotary settings as transformers standardizes them: "rope_type", "rope_theta" and what else
            the type takes.
        diff_spec: specification of the attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    initializer_range: float
    rms_norm_eps: float
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]
    diff_spec: DiffSpec


def read_spec(spec: Mapping[str, Any] | None) -> DiffSpec:
    """The attention's specification from the plain data of a config.json.

    Raises:
        CheckpointError: the specification is missing or contradicts itself.
    """
    if not spec:
        raise CheckpointError("config.json has no `spec`: a diff_transformer checkpoint must describe its attention")
    try:
        return DiffSpec(**spec)
    except TypeError as error:
        raise CheckpointError(f"config.json: `spec` is not a DiffSpec: {error}") from error
