"""Adapter of DiffTransformer's own checkpoints, as its `save_pretrained` writes them."""

from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import read_spec
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import LLAMA, read_sizes
from diffquant.model.transformer import TransformerArchitecture

# Defaults of DiffTransformerConfig.
NATIVE = {
    **LLAMA,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}


@register("diff_transformer")
def read_native(config: dict[str, Any]) -> Adapter:
    """Adapter that changes nothing: names and layout are DiffTransformer's already.

    Raises:
        CheckpointError: sizes contradict each other, or heads have two widths.
    """
    spec = read_spec(config.get("spec"))
    if config.get("head_dim") not in (None, spec.head_dim):
        raise CheckpointError(f"config.json: head_dim is {config['head_dim']!r}, and `spec` has {spec.head_dim}")
    sizes = read_sizes(config | {"head_dim": spec.head_dim}, NATIVE)
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))
