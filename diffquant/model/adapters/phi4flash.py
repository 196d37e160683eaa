"""Adapter of Phi-4-mini-flash-reasoning: SambaY with DIFF V1, heads side by side, no rotation."""

import math
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.activations import activation_named
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import LLAMA, check_width, read_eps, read_sizes, v1_spec
from diffquant.model.sambay.architecture import SambaYArchitecture

# Defaults of Phi4FlashConfig, and those of Mamba that its modelling code builds whatever the config says.
PHI4FLASH: Mapping[str, Any] = {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}
_MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_FIXED = {
    "mb_per_layer": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "layer_types": None,
    "rope_scaling": None,
}
_SUBLN_EPS = 1e-5


@register("phi4flash", windows=True)
def read_phi4flash(config: dict[str, Any]) -> Adapter:
    """Adapter of a `phi4flash` config.json.

    Raises:
        CheckpointError: sizes contradict each other, or settings are ones that the published model does not have.

    Source: configuration_phi4flash.py and modeling_phi4flash.py of microsoft/Phi-4-mini-flash-reasoning.
    """
    _refuse_settings(config)
    eps = read_eps(config, "layer_norm_eps")
    sizes = read_sizes(config | {"rms_norm_eps": eps}, PHI4FLASH)
    check_width(config, sizes)
    if sizes["head_dim"] * sizes["num_attention_heads"] != sizes["hidden_size"]:
        raise CheckpointError(f"config.json: head_dim is {sizes['head_dim']}, and heads must make up the hidden_size")
    spec = v1_spec(sizes, post_norm="affine", post_norm_eps=_SUBLN_EPS, rope="none")
    for transformers_own in ("rms_norm_eps", "attention_bias", "mlp_bias", "rope_parameters"):
        del sizes[transformers_own]
    return Adapter(SambaYArchitecture(**sizes, **_mamba_sizes(config), layer_norm_eps=eps, diff_spec=spec))


def _refuse_settings(config: dict[str, Any]) -> None:
    """Refuse settings whose meaning the published model does not show."""
    wrong = [
        f"{key} is {config[key]!r}, not {fixed!r}"
        for key, fixed in _FIXED.items()
        if config.get(key, fixed) not in (fixed, None)
    ]
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers % 4:
        wrong.append(f"num_hidden_layers is {layers}, no multiple of 4")
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        wrong.append(f"sliding_window is {window!r}, not a number of tokens")
    if activation_named(config.get("hidden_act", "silu")).parameters:
        wrong.append(f"hidden_act is {config['hidden_act']!r}, which has parameters")
    if wrong:
        raise CheckpointError(f"config.json: {'; '.join(wrong)}, which is not computed for phi4flash")


def _mamba_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of Mamba and of the window.

    Raises:
        CheckpointError: some are no positive numbers, or the steps' width is not the one that the model is built with.
    """
    sizes = {key: config.get(key, default) for key, default in _MAMBA.items()}
    wrong = [f"{key} is {size!r}" for key, size in sizes.items() if type(size) is not int or size < 1]
    rank, built = config.get("mamba_dt_rank", "auto"), math.ceil(config["hidden_size"] / 16)
    if rank not in ("auto", None, built):
        wrong.append(f"mamba_dt_rank is {rank!r}, while the model is built with {built}")
    if wrong:
        raise CheckpointError(f"config.json is not a valid phi4flash configuration: {'; '.join(wrong)}")
    return {**sizes, "mamba_dt_rank": built, "sliding_window": config.get("sliding_window", 2047)}
