"""Adapter of the plain Llama, the matched baseline: one map, no λ."""

from typing import Any

from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import LLAMA, check_width, read_sizes
from diffquant.model.transformer import TransformerArchitecture


@register("llama")
def read_llama(config: dict[str, Any]) -> Adapter:
    """Adapter of a `llama` config.json.

    Source: transformers/models/llama.
    """
    sizes = read_sizes(config, LLAMA)
    check_width(config, sizes)
    spec = DiffSpec(
        pairs=sizes["num_attention_heads"],
        kv_pairs=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["head_dim"],
        maps=1,
    )
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))
