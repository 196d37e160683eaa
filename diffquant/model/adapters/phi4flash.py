"""Adapter for Phi-4-mini-flash-reasoning: SambaY with DIFF V1, adjacent heads, no rotary embedding."""

import math
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.activations import PARAMETERS
from diffquant.model.adapters.base import Adapter, register
from diffquant.model.adapters.sizes import LLAMA, check_width, read_eps, read_sizes, v1_spec
from diffquant.model.sambay.architecture import SambaYArchitecture

# Defaults of Phi4FlashConfig, and the Mamba sizes that its modelling code hard-codes.
PHI4FLASH: Mapping[str, Any] = {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}
_OWN = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "sliding_window": 2047}
_FIXED: Mapping[str, Any] = {
    "mb_per_layer": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "layer_types": None,
    "rope_scaling": None,
}
_SUBLN_EPS = 1e-5


@register("phi4flash", supports_windows=True)
def read_phi4flash(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `phi4flash` config.json.

    Raises:
        CheckpointError: sizes contradict each other, or settings differ from those of the published model.

    Source: configuration_phi4flash.py and modeling_phi4flash.py of microsoft/Phi-4-mini-flash-reasoning.
    """
    eps = read_eps(config, "layer_norm_eps")
    sizes = read_sizes(config | {"rms_norm_eps": eps}, PHI4FLASH)
    check_width(config, sizes)
    if sizes["head_dim"] * sizes["num_attention_heads"] != sizes["hidden_size"]:
        raise CheckpointError(
            f"config.json: head_dim is {sizes['head_dim']}, but head_dim x num_attention_heads must be hidden_size"
        )
    spec = v1_spec(sizes, post_norm="affine", post_norm_eps=_SUBLN_EPS, rope="none")
    own = _own_sizes(config, sizes)
    for transformers_own in ("rms_norm_eps", "attention_bias", "mlp_bias", "rope_parameters"):
        del sizes[transformers_own]
    return Adapter(SambaYArchitecture(**sizes, **own, layer_norm_eps=eps, diff_spec=spec))


def _own_sizes(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of Mamba and of the window.

    Raises:
        CheckpointError: sizes are not positive numbers, or settings differ from those of the published model.
    """
    fixed = {**_FIXED, "mamba_dt_rank": math.ceil(sizes["hidden_size"] / 16)}
    own = {key: config.get(key, default) for key, default in _OWN.items()}
    wrong = [
        f"{key} is {config[key]!r}, not {value!r}"
        for key, value in fixed.items()
        if config.get(key) not in (value, None) and (key, config[key]) != ("mamba_dt_rank", "auto")
    ]
    wrong += [
        f"{key} is {size!r}, not an integer above 0"
        for key, size in own.items()
        if (type(size) is not int or size < 1) and (key, size) != ("sliding_window", None)
    ]
    if sizes["num_hidden_layers"] % 4:
        wrong.append(f"num_hidden_layers is {sizes['num_hidden_layers']}, not a multiple of 4")
    if sizes["hidden_act"] in PARAMETERS:
        wrong.append(f"hidden_act is {sizes['hidden_act']!r}, which has parameters")
    if wrong:
        raise CheckpointError(f"config.json: {'; '.join(wrong)}, which is not supported for phi4flash")
    return {**own, "mamba_dt_rank": fixed["mamba_dt_rank"]}
