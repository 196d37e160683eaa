"""Adapter of Hugging Face's `diffllama`: DIFF V1, heads in halves, per-pair norm without a weight."""

from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import DIFFLLAMA, read_sizes, v1_spec
from diffquant.model.transformer import TransformerArchitecture


@register("diffllama")
def read_diffllama(config: dict[str, Any]) -> Adapter:
    """Adapter of a `diffllama` config.json.

    Raises:
        CheckpointError: sizes contradict each other, or `mlp_bias` asks for biases.

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
