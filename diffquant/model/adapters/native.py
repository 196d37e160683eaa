"""Adapter of DiffTransformer's own checkpoints, as its `save_pretrained` writes them."""

from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import read_spec
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import read_sizes
from diffquant.model.transformer import DEFAULTS, TransformerArchitecture


@register("diff_transformer")
def read_native(config: dict[str, Any]) -> Adapter:
    """Adapter that changes nothing: names and layout are DiffTransformer's already.

    Raises:
        CheckpointError: sizes contradict each other, or heads have two widths.
    """
    spec = read_spec(config.get("spec"))
    if config.get("head_dim") not in (None, spec.head_dim):
        raise CheckpointError(f"config.json: head_dim is {config['head_dim']!r}, and `spec` has {spec.head_dim}")
    sizes = read_sizes(config | {"head_dim": spec.head_dim}, DEFAULTS)
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))
