"""Adapters for Llama, Hugging Face's `diffllama`, and this package's own format."""

from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec, read_spec
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import DIFFLLAMA, LLAMA, check_width, read_sizes, v1_spec
from diffquant.model.architecture import DEFAULTS, TransformerArchitecture


@register("diffllama")
def read_diffllama(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `diffllama` config.json.

    Raises:
        CheckpointError: sizes contradict each other, or `mlp_bias` is true.

    Source: transformers/models/diffllama.
    """
    sizes = read_sizes(config, DIFFLLAMA)
    if sizes["mlp_bias"]:
        raise CheckpointError(
            "config.json: mlp_bias is true, and diffllama's MLP has no biases, which transformers would leave out; if "
            "the checkpoint holds none, remove the key"
        )
    spec = v1_spec(sizes, head_order="halves", post_norm="plain", post_norm_eps=sizes["rms_norm_eps"])
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))


@register("llama")
def read_llama(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `llama` config.json.

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


@register("diff_transformer")
def read_diff_transformer(config: dict[str, Any]) -> Adapter:
    """Create the adapter for this package's own format, whose names and layout need no translation.

    Raises:
        CheckpointError: sizes contradict each other, or `head_dim` differs from that of `spec`.
    """
    spec = read_spec(config.get("spec"))
    if config.get("head_dim") not in (None, spec.head_dim):
        raise CheckpointError(f"config.json: head_dim is {config['head_dim']!r}, and `spec` has {spec.head_dim}")
    sizes = read_sizes(config | {"head_dim": spec.head_dim}, DEFAULTS)
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))
