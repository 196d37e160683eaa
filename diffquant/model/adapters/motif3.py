"""Adapter for Motif-3. Its model_type is that of earlier Motif models; `motif` chooses the adapter."""

import math
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.base import Adapter, has_type
from diffquant.model.adapters.sizes import LLAMA, read_sizes
from diffquant.model.motif3.architecture import Motif3Architecture

# A config.json with any of these keys belongs to Motif-3.
OWN_KEYS = ("kv_lora_rank", "q_lora_rank", "diff_v2", "num_experts")

_DEFAULTS: Mapping[str, Any] = {**LLAMA, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
_FROM_ONE, _FROM_ZERO, _FINITE, _SWITCH = "an integer above 0", "an integer, 0 or more", "a number", "true or false"
# Settings beyond Llama's, grouped by their allowed values, with defaults from the vendor's code. None means no default
# here.
_OWN: Mapping[str, Mapping[str, Any]] = {
    _FROM_ONE: {
        **dict.fromkeys((
            "num_noise_heads", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "num_experts", "experts_top_k",
            "mhc_expansion_rate", "original_seq_len",
        )),
        "interleave_moe_layer_step": 1, "sliding_window_period": 4, "mhc_sinkhorn_iters": 20,
    },
    _FROM_ZERO: {"n_dense_first_layers": 0, "num_nextn_predict_layers": 0},
    _FINITE: {
        "route_scale": 1.0, "polynorm_output_scale": 1.0, "hidden_clamp": 1000.0, "mhc_h_post_alpha_end": 0.0,
        "swa_rope_theta": 10000.0, "rope_factor": 1.0, "mscale": 1.0,
    },
    _SWITCH: {"route_norm": False, "polynorm_sigmoid_weight": True},
}  # fmt: skip
_OPTIONAL_NUMBERS = ("polynorm_bias_clamp", "load_balance_coeff")
# Values that all released models have; others are not supported. Since the vendor's defaults differ, a config.json must
# state them, unless this package wrote it.
_FIXED: Mapping[str, Any] = {
    "attention_cls": "gdla",
    "diff_v2": True,
    "elementwise_attn_output_gate": True,
    "score_func": "sigmoid",
    "hidden_act": "poly_norm",
    "mhc_enabled": True,
    "num_shared_experts": 1,
}
# Values that all released models have and that are the default; others are not supported.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "headwise_attn_output_gate": (False,),
    "score_before_experts": (False,),
    "sliding_window_pattern": ("interleave",),
    "attention_bias": (False,),
    "use_bias": (False,),
    "mlp_bias": (False,),
    "k_ratio": (1,),
}


def read_motif3(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a Motif-3 config.json.

    Raises:
        CheckpointError: sizes are missing or contradict each other, or no released model has these settings; the
            message lists all problems.

    Source: the configuration of MotifTechnologies' vLLM port; the headers of Motif-Technologies/Motif-3.
    """
    sizes = read_sizes(config, _DEFAULTS)
    rope = sizes["rope_parameters"]
    for of_llama in ("attention_bias", "mlp_bias"):
        del sizes[of_llama]
    own, problems = _own_settings(config, sizes)
    if rope["rope_type"] not in ("default", "yarn"):
        problems.append(f"rope_scaling has type {rope['rope_type']!r}")
    problems = problems or _contradictions(sizes, own)
    if problems:
        raise CheckpointError(f"config.json: {'; '.join(problems)}, which is not supported for Motif-3")
    noises = own["num_noise_heads"]
    spec = DiffSpec(
        pairs=sizes["num_attention_heads"] - noises,
        kv_pairs=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        value_dim=own["v_head_dim"],
        shared_k=True,
        lam="sigmoid",
        signals_per_noise=sizes["num_attention_heads"] // noises - 1,
        output_gate=True,
    )
    return Adapter(Motif3Architecture(**sizes, **own, diff_spec=spec))


def _own_settings(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings beyond Llama's; return them and a list of the problems found."""
    is_ours = "spec" in config
    # Models saved by this package have no layers for multi-token prediction.
    stated = {**config, "num_nextn_predict_layers": 0} if is_ours else config
    kinds = {key: kind for kind, keys in _OWN.items() for key in keys}
    kinds |= {"qk_rope_head_dim": _FROM_ONE, "v_head_dim": _FROM_ONE}
    defaults = {key: default for keys in _OWN.values() for key, default in keys.items()}
    defaults |= {"qk_rope_head_dim": sizes["head_dim"] // 2, "v_head_dim": sizes["head_dim"]}
    own = {key: stated.get(key, default) for key, default in defaults.items()}
    optional = {key: config.get(key) for key in _OPTIONAL_NUMBERS}
    by_layer = config.get("polynorm_output_scale_per_layer") or {}
    checked = {key: (value, kinds[key]) for key, value in own.items()}
    checked |= {key: (value, _FINITE) for key, value in optional.items() if value is not None}
    if is_object := isinstance(by_layer, Mapping):
        checked |= {f"polynorm_output_scale_per_layer of {key}": (value, _FINITE) for key, value in by_layer.items()}
    window = config.get("sliding_window") if config.get("use_sliding_window", is_ours) else None
    if window is not None:
        checked["sliding_window"] = window, _FROM_ONE
    problems = [f"{key} is {value!r}, not {kind}" for key, (value, kind) in checked.items() if not _is(value, kind)]
    if not is_object:
        problems.append(f"polynorm_output_scale_per_layer is {by_layer!r}, not an object")
    if not is_ours and "use_sliding_window" not in config and config.get("sliding_window") is not None:
        problems.append("sliding_window is stated without use_sliding_window")
    fixed = {key: config.get(key, x if is_ours else None) for key, x in _FIXED.items()}
    problems += [f"{key} is {fixed[key]!r}, not {x!r}" for key, x in _FIXED.items() if fixed[key] != x]
    problems += [
        f"{key} is {config[key]!r}, not {known[0]!r}"
        for key, known in _NEUTRAL.items()
        if config.get(key) not in (None, *known)
    ]
    return own | optional | {"sliding_window": window, "polynorm_output_scale_per_layer": by_layer}, problems


def _contradictions(sizes: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    heads, noises, kv_heads = sizes["num_attention_heads"], own["num_noise_heads"], sizes["num_key_value_heads"]
    problems = []
    if heads % noises or heads == noises:
        problems.append(f"num_noise_heads {noises} does not divide num_attention_heads {heads} into groups")
    if noises != kv_heads:
        problems.append(f"num_noise_heads {noises} is not num_key_value_heads {kv_heads}")
    rope = own["qk_rope_head_dim"]
    if rope % 2 or rope >= sizes["head_dim"]:
        problems.append(f"qk_rope_head_dim {rope} is odd or not below head_dim {sizes['head_dim']}")
    if own["experts_top_k"] > own["num_experts"]:
        problems.append(f"experts_top_k {own['experts_top_k']} is more than num_experts {own['num_experts']}")
    return problems


def _is(value: object, kind: str) -> bool:
    """Test whether a value is allowed for one of the groups of `_OWN`."""
    if kind in (_FROM_ONE, _FROM_ZERO):
        return type(value) is int and value >= (1 if kind == _FROM_ONE else 0)
    if kind == _FINITE:
        return has_type(value, (int, float)) and math.isfinite(float(str(value)))
    return isinstance(value, bool)
