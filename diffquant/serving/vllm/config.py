"""Configurations of the family as vLLM reads them from any folder, and the heads of each tensor-parallel rank."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from diffquant.errors import UsageError
from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import Architecture, TransformerArchitecture
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.quantization.engine_folder import config_for_engines, describe_ignored_schemes, require_vllm_support
from diffquant.quantization.modeling_diffquant import DiffConfig, PlainHeads


class ServedConfig(DiffConfig):
    """A configuration whose `architectures` names the plugin's model, whatever config.json names."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.diff_model is not None and "kv_lora_rank" in self.diff_model:
            # Entries that a layer without a window caches per token, by which vLLM checks its kernels for latents.
            self.head_dim = self.kv_lora_rank + self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "ServedConfig":
        """Make the configuration from the content of config.json.

        Raises:
            CheckpointError: sizes or settings in config.json are missing, invalid or not supported.
            UnknownModelTypeError: the plugin has no layers for the model.
        """
        if "diff_model" not in config_dict:
            adapter = adapter_for(config_dict)
            require_vllm_support(config_dict, adapter)
            config_dict = _served_config(config_dict, adapter)
        config: ServedConfig = super().from_dict(config_dict, **kwargs)
        return config


def _served_config(config: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """Return the content of config.json with the plugin's model and the numbers of its plain heads.

    Architectures that the modelling file does not run keep their own config.json under `diff_source`.
    """
    architecture = adapter.architecture
    if isinstance(architecture, TransformerArchitecture):
        return config_for_engines(config, adapter)
    # vLLM would apply this window to all layers.
    sizes = {name: value for name, value in architecture.settings.items() if name != "sliding_window"}
    return {name: value for name, value in config.items() if name != "sliding_window"} | {
        "architectures": [architecture.served.partition(":")[2]],
        "diff_model": sizes | {"attention": plain_spec(architecture.diff_spec)},
        "diff_source": config,
    }


def plain_spec(spec: DiffSpec) -> dict[str, Any]:
    """Return an attention specification as plain data, in the form that `PlainHeads` takes."""
    return spec.to_dict() | {"kv_repeats": 1, "output": ""}


def architecture_of(config: ServedConfig) -> Any:
    """Return the `Architecture` of a model with its own decoder class, such as SambaY or Motif-3."""
    return adapter_for(config.diff_source).architecture


def warn_of_ignored_schemes(vllm_config: Any) -> None:
    """Log one warning that lists which schemes of the served folder's recipe vLLM does not apply, if any."""
    from vllm.logger import init_logger

    if asked := describe_ignored_schemes(vllm_config.model_config.hf_config.to_dict()):
        cache, dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
        stored = str(dtype).removeprefix("torch.") if cache == "auto" else cache
        said = "%s of the recipe are not applied: K and V are stored as %s, and logits are exact"
        init_logger(__name__).warning_once(said, asked, stored, scope="global")


# Architectures that the plugin serves.
SERVED: Sequence[type[Architecture]] = (TransformerArchitecture, SambaYArchitecture, Motif3Architecture)
# Every model_type that an adapter reads. Motif's files have "Motif" or "motif".
_MODEL_TYPES = ("diffllama", "diff_v1", "diff_v2", "diff_transformer", "Motif", "motif", "phi4flash")
_CONFIGS = {kind: type(f"ServedConfig_{kind}", (ServedConfig,), {"model_type": kind}) for kind in _MODEL_TYPES}
# vLLM's processes pickle these classes, so each one needs its name in this module.
globals().update({config.__name__: config for config in _CONFIGS.values()})


def register_configs() -> None:
    """Register a `ServedConfig` for each supported model_type with transformers, by which vLLM reads config.json."""
    for kind, config in _CONFIGS.items():
        AutoConfig.register(kind, config, exist_ok=True)


def heads_of_rank(spec: dict[str, Any], ranks: int) -> PlainHeads:
    """Return the layout of the heads that each tensor-parallel rank computes.

    Args:
        spec: attention specification as plain data, as in config.json's `diff_model`.
        ranks: number of tensor-parallel ranks. With more than one, projections have the row order of `row_orders`.

    Raises:
        UsageError: a signal head would be on another rank than its noise head, keys or values.
    """
    heads = PlainHeads(spec | {"rope": "none"})
    if ranks == 1:
        return heads
    noises = heads.pairs // heads.sharing if heads.has_noise else heads.pairs
    stored = heads.kv_pairs // heads.repeats
    # vLLM's layer can repeat the keys of one map on several ranks; of two maps it would repeat each separately.
    is_repeated = heads.key_maps == heads.repeats == 1 and ranks % stored == 0
    if noises % ranks or (stored % ranks and not is_repeated):
        raise UsageError(
            f"tensor_parallel_size {ranks} does not divide {noises} pairs or groups of pairs and {stored} KV pairs: "
            "a pair's maps, keys and values have to be on one rank"
        )
    of_rank = {"pairs": heads.pairs // ranks, "kv_pairs": max(heads.kv_pairs // ranks, 1), "head_order": "adjacent"}
    return PlainHeads(spec | {"rope": "none"} | of_rank)


def row_orders(spec: dict[str, Any], ranks: int) -> dict[str, Tensor]:
    """Return how the rows of Q, K and V projections are reordered for several tensor-parallel ranks.

    A rank takes consecutive rows. If a checkpoint has all signal heads before all noise heads, rows are therefore
    reordered so that each noise head follows its signal heads. With a single rank no rows are reordered.

    Returns:
        For each projection with a changed order, by name: the index of the checkpoint's row for each served row.
    """
    if ranks == 1 or not PlainHeads(spec).are_in_halves:
        return {}
    known = {name: value for name, value in spec.items() if name not in ("kv_repeats", "output")}
    stored, served = DiffSpec(**known), DiffSpec(**known | {"head_order": "adjacent"})
    orders = {name: stored.layout.permutation_to(served.layout, name) for name in PROJECTIONS}
    return {name: order for name, order in orders.items() if order is not None}
