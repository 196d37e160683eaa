"""Configurations of the family as vLLM reads them from any folder, those of other writers included."""

from typing import Any

from transformers import AutoConfig

from diffquant.model.adapters import adapter_for
from diffquant.serve.folder import config_for_engines, require_served
from diffquant.serve.modeling_diffquant import DiffConfig


class ServedConfig(DiffConfig):
    """A configuration that names the plugin's model, whatever architecture the folder names."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "ServedConfig":
        """The configuration of a config.json.

        Raises:
            CheckpointError: as the adapter of the model type raises it.
            UnknownModelTypeError: the plugin has no layers for the model.
        """
        if "diff_model" not in config_dict:
            adapter = adapter_for(config_dict)
            require_served(config_dict, adapter)
            config_dict = config_for_engines(config_dict, adapter)
        config: ServedConfig = super().from_dict(config_dict, **kwargs)
        return config


# Processes of vLLM send them to one another, so that each has a name in this module.
class DiffLlamaConfig(ServedConfig):
    """Hugging Face's DiffLlama."""

    model_type = "diffllama"


class DiffV1Config(ServedConfig):
    """DIFF V1 of microsoft/unilm."""

    model_type = "diff_v1"


class DiffV2Config(ServedConfig):
    """DIFF V2 of microsoft/unilm."""

    model_type = "diff_v2"


class DiffTransformerConfig(ServedConfig):
    """diffquant's own format, which has every member of the family."""

    model_type = "diff_transformer"


class MotifConfig(ServedConfig):
    """Motif-2.6B and Motif-2-12.7B, whose files say "Motif" or "motif"; Motif-3, which is refused, does too."""

    model_type = "Motif"


class SmallMotifConfig(ServedConfig):
    """The same models under their other name."""

    model_type = "motif"


class Phi4FlashConfig(ServedConfig):
    """Phi-4-mini-flash, which the plugin does not serve."""

    model_type = "phi4flash"


_CONFIGS = (
    DiffLlamaConfig, DiffV1Config, DiffV2Config, DiffTransformerConfig, MotifConfig, SmallMotifConfig, Phi4FlashConfig,
)  # fmt: skip


def register_configs() -> None:
    """Have transformers, which reads configurations for vLLM, make those of the family of these classes."""
    for config in _CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
