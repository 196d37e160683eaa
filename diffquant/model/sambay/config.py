"""The configuration of a SambaY model, as transformers keeps one."""

from typing import Any

from transformers import PreTrainedConfig

from diffquant.family.spec import DiffSpec, read_spec


class SambaYConfig(PreTrainedConfig):
    """Sizes of a `SambaYArchitecture`, by the names that Phi-4-mini-flash-reasoning's config.json has for them.

    `spec` holds the fields of a `DiffSpec` as plain data; `diff_spec` is the checked object.
    """

    model_type = "phi4flash"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 200064
    hidden_size: int = 2560
    intermediate_size: int = 10240
    num_hidden_layers: int = 32
    num_attention_heads: int = 40
    num_key_value_heads: int = 20
    head_dim: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 262144
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    sliding_window: int | None = 512
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 160
    spec: dict[str, Any] | None = None

    @property
    def diff_spec(self) -> DiffSpec:
        """The attention's specification.

        Raises:
            CheckpointError: the specification is missing or contradicts itself.
        """
        return read_spec(self.spec)
