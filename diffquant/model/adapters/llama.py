"""Plain Llama, the matched baseline: one map, no λ."""

from typing import Any

from transformers import LlamaConfig

from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.base import Adapter, build_config, read_sizes, register


@register("llama")
def read_llama(config: dict[str, Any]) -> Adapter:
    """Source: transformers/models/llama."""
    sizes = read_sizes(config, LlamaConfig)
    spec = DiffSpec(
        pairs=sizes["num_attention_heads"],
        kv_pairs=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["head_dim"],
        maps=1,
    )
    return Adapter(build_config(sizes, spec))
