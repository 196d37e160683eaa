"""DiffTransformer's own checkpoints, as its `save_pretrained` writes them."""

from typing import Any

from diffquant.model.adapters.base import Adapter, register
from diffquant.model.config import DiffTransformerConfig


@register("diff_transformer")
def read_native(config: dict[str, Any]) -> Adapter:
    """The identity: names and layout are DiffTransformer's."""
    ours = DiffTransformerConfig(**{key: value for key, value in config.items() if key != "quantization_config"})
    _ = ours.diff_spec
    return Adapter(ours)
