"""Configurations of the family as vLLM reads them from any folder, and the heads of each tensor-parallel rank."""

from typing import Any

from torch import Tensor
from transformers import AutoConfig

from diffquant.errors import UsageError
from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import adapter_for
from diffquant.quantization.engine_folder import config_for_engines, require_served
from diffquant.quantization.modeling_diffquant import DiffConfig, PlainHeads


class ServedConfig(DiffConfig):
    """A configuration that names the plugin's model, whatever architecture the folder names."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "ServedConfig":
        """Make the configuration from the content of config.json.

        Raises:
            CheckpointError: the adapter of the model type raises it.
            UnknownModelTypeError: the plugin has no layers for the model.
        """
        if "diff_model" not in config_dict:
            adapter = adapter_for(config_dict)
            require_served(config_dict, adapter)
            config_dict = config_for_engines(config_dict, adapter)
        config: ServedConfig = super().from_dict(config_dict, **kwargs)
        return config


# Every model_type that an adapter reads. Motif's files have "Motif" or "motif". Motif-3, which has the same, and
# Phi-4-mini-flash are refused.
_MODEL_TYPES = ("diffllama", "diff_v1", "diff_v2", "diff_transformer", "Motif", "motif", "phi4flash")
_CONFIGS = {kind: type(f"ServedConfig_{kind}", (ServedConfig,), {"model_type": kind}) for kind in _MODEL_TYPES}
# vLLM's processes pickle these classes, so each one needs its name in this module.
globals().update({config.__name__: config for config in _CONFIGS.values()})


def register_configs() -> None:
    """Register these classes with transformers, which reads configurations for vLLM."""
    for kind, config in _CONFIGS.items():
        AutoConfig.register(kind, config, exist_ok=True)


def heads_of_rank(spec: dict[str, Any], ranks: int) -> PlainHeads:
    """Return the heads that each tensor-parallel rank computes, in the order of `row_orders`.

    Raises:
        UsageError: the ranks would separate a pair from its noise map or its keys.
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
    """Return the index of the checkpoint's row for each served row, for each projection whose rows move.

    A rank takes consecutive rows, so a checkpoint with all signal heads before all noise heads is reordered into pairs.
    With a single rank nothing moves, so LoRA adapters work.
    """
    if ranks == 1 or not PlainHeads(spec).are_in_halves:
        return {}
    known = {name: value for name, value in spec.items() if name not in ("kv_repeats", "output")}
    stored, served = DiffSpec(**known), DiffSpec(**known | {"head_order": "adjacent"})
    orders = {name: stored.layout.permutation_to(served.layout, name) for name in PROJECTIONS}
    return {name: order for name, order in orders.items() if order is not None}
