"""The configuration of a DiffTransformer, as transformers keeps one."""

from typing import Any

from transformers import PreTrainedConfig

from diffquant.family.spec import DiffSpec, read_spec


class DiffTransformerConfig(PreTrainedConfig):
    """Sizes of a decoder-only model, as Llama names them, and the `DiffSpec` of its attention.

    `spec` holds the fields of a `DiffSpec` as plain data, so that it survives config.json;
    `diff_spec` is the checked object.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    spec: dict[str, Any] | None = None

    @property
    def diff_spec(self) -> DiffSpec:
        """The attention's specification.

        Raises:
            CheckpointError: the specification is missing or contradicts itself.
        """
        return read_spec(self.spec)
