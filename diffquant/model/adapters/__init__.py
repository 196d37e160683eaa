"""Adapters that map a checkpoint's tensor names and head layout to those of this package's models.

There is one file per source format. An adapter translates a config.json and tensor names and never reads tensor data.
Formats differ in the order of heads inside a projection. That order is recorded in the `DiffSpec`, so tensors, packed
ones included, are loaded unchanged. Only if KV heads must be repeated (unilm V1 with plain GQA pairing) does
`Adapter.row_order` select rows.

Importing this package registers all adapters.
"""

import sys
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError, UnknownModelTypeError
from diffquant.model.adapters.base import READERS, WITH_WINDOWS, Adapter, refuse_settings, refuse_windows, register
from diffquant.model.adapters.sizes import check_rope_angles
from diffquant.model.architecture import TransformerArchitecture
from diffquant.support.names import import_all, option_name

import_all(sys.modules[__name__])
_FULL = "full_attention"
# Settings that transformers or vLLM apply to any model, and caps of logits, with the values that have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
}


def adapter_for(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a config.json, chosen by its `model_type`.

    Raises:
        UnknownModelTypeError: no adapter reads its `model_type`.
        CheckpointError: a size is missing or contradicts another, or a setting is not supported.
    """
    # Motif's model_type occurs as "Motif" and as "motif".
    model_type = str(config.get("model_type")).lower()
    if model_type not in READERS:
        raise UnknownModelTypeError(
            f"model_type {config.get('model_type')!r} is not supported; choose from {', '.join(READERS)}. A DIFF "
            "model of your own training, or of unilm's code, is diff_v1, diff_v2 or diff_transformer: see "
            "docs/models.md, Your own training. For other architectures `inspect` counts the weights and `quantize` "
            f"packs them with {option_name('weights_only', True)}, but diffquant cannot run the model"
        )
    if model_type not in WITH_WINDOWS:
        refuse_windows(config)
    _refuse_kinds_of_layers(config)
    refuse_settings(config, _NEUTRAL)
    adapter = READERS[model_type](config)
    if isinstance(adapter.architecture, TransformerArchitecture):
        check_rope_angles(adapter.architecture)
    return adapter


def has_adapter(config: Mapping[str, Any]) -> bool:
    """Return whether there is an adapter for a config.json's `model_type`."""
    return str(config.get("model_type")).lower() in READERS


def _refuse_kinds_of_layers(config: dict[str, Any]) -> None:
    """Refuse layer types other than full attention, and settings of individual layers."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != _FULL for kind in kinds):
        others = sorted({str(kind) for kind in kinds} - {_FULL}) if isinstance(kinds, list) else [repr(kinds)]
        raise CheckpointError(f"config.json: layer_types has {', '.join(others)}; only {_FULL} is supported")
    if config.get("per_layer_config"):
        raise CheckpointError("config.json: per_layer_config sets layers individually, which is not supported")


__all__ = ["READERS", "Adapter", "adapter_for", "register"]
