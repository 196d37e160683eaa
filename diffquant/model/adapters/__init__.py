"""Adapters from a checkpoint's own names and head layout to those of the model that runs it, one file a source format.

An adapter is pure: it translates a config.json and names, and never reads a tensor's data. Formats
differ in how heads are ordered inside a projection; that order goes into the `DiffSpec`, so tensors
(packed ones too) are loaded as they are. Only where KV heads must be repeated (unilm V1 with its
plain GQA pairing) does `Adapter.row_order` pick rows.

Importing this package registers every file in it.
"""

import sys
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError, UnknownModelTypeError
from diffquant.model.adapters.base import READERS, WITH_WINDOWS, Adapter, refuse_windows, register
from diffquant.model.adapters.rotary import check_angles
from diffquant.model.transformer import TransformerArchitecture
from diffquant.support.discovery import import_all
from diffquant.support.spelling import spelled

import_all(sys.modules[__name__])
_FULL = "full_attention"
_DRAGON = (
    "Mamba-3, the geodesic residual and experts behind a latent are not implemented; the weights can be quantized, by "
    "`quantize` with {weights_only}, but not run"
)
# Types that are known and not run, and why.
NOT_RUN = {"dragon": _DRAGON, "olala": _DRAGON}
# Settings that transformers or vLLM compute for any model, and caps of logits, with the values at which they change
# nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
}


def adapter_for(config: dict[str, Any]) -> Adapter:
    """Adapter of a config.json's source format.

    Raises:
        UnknownModelTypeError: no adapter reads its `model_type`.
        CheckpointError: a size is missing or contradicts another, or a setting asks for what is not computed.
    """
    # Motif's files say "Motif" or "motif".
    model_type = str(config.get("model_type")).lower()
    if model_type in NOT_RUN:
        reason = NOT_RUN[model_type].format(weights_only=spelled("weights_only", True))
        raise UnknownModelTypeError(f"model_type {config['model_type']!r} is not read: {reason}")
    if model_type not in READERS:
        raise UnknownModelTypeError(
            f"model_type {config.get('model_type')!r} is not read; supported are {', '.join(READERS)}. A DIFF model of "
            "your own training, or of unilm's code, is diff_v1, diff_v2 or diff_transformer: docs/models.md, Your own "
            "training, has the keys and names. Of any other architecture `inspect` counts the weights and `quantize` "
            f"packs them, with {spelled('weights_only', True)}, but nothing runs it"
        )
    if model_type not in WITH_WINDOWS:
        refuse_windows(config)
    _refuse_kinds_of_layers(config)
    _refuse_settings(config)
    adapter = READERS[model_type](config)
    if isinstance(adapter.architecture, TransformerArchitecture):
        check_angles(adapter.architecture)
    return adapter


def is_read(config: Mapping[str, Any]) -> bool:
    """Whether an adapter reads a config.json's `model_type`."""
    return str(config.get("model_type")).lower() in READERS


def _refuse_kinds_of_layers(config: dict[str, Any]) -> None:
    """Refuse layers that differ from one another: all of them are computed alike."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != _FULL for kind in kinds):
        others = sorted({str(kind) for kind in kinds} - {_FULL}) if isinstance(kinds, list) else [repr(kinds)]
        raise CheckpointError(f"config.json: layer_types has {', '.join(others)}, which is not computed; {_FULL} is")
    if config.get("per_layer_config"):
        raise CheckpointError(
            "config.json: per_layer_config gives layers settings of their own, which are not computed"
        )


def _refuse_settings(config: dict[str, Any]) -> None:
    """Refuse settings that other runtimes compute whatever the model is, such as attention that is not causal."""
    stated = [f"{key} is {config[key]!r}" for key, neutral in _NEUTRAL.items() if config.get(key) not in neutral]
    if stated:
        raise CheckpointError(
            f"config.json: {', '.join(stated)}, which is not computed; if the model does without, remove it"
        )


__all__ = ["NOT_RUN", "READERS", "Adapter", "adapter_for", "register"]
