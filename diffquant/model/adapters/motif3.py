"""Motif-3's config.json, which has the model_type of the Motifs before it; `motif` tells them apart."""

import math
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.base import Adapter, is_a
from diffquant.model.adapters.sizes import LLAMA, read_sizes
from diffquant.model.motif3.architecture import Motif3Architecture

# Keys of which each says that a Motif is Motif-3.
OWN_KEYS = ("kv_lora_rank", "q_lora_rank", "diff_v2", "num_experts")

_DEFAULTS: Mapping[str, Any] = {**LLAMA, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = (
    "num_noise_heads", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "num_experts", "experts_top_k",
    "mhc_expansion_rate", "original_seq_len",
)  # fmt: skip
# Sizes that other keys, or the vendor's code, give where a config leaves them out.
_DEFAULT_SIZES: Mapping[str, int] = {
    "interleave_moe_layer_step": 1,
    "sliding_window_period": 4,
    "mhc_sinkhorn_iters": 20,
}
_COUNTS: Mapping[str, int] = {"n_dense_first_layers": 0, "num_nextn_predict_layers": 0}
_NUMBERS: Mapping[str, float] = {
    "route_scale": 1.0,
    "polynorm_output_scale": 1.0,
    "hidden_clamp": 1000.0,
    "mhc_h_post_alpha_end": 0.0,
    "swa_rope_theta": 10000.0,
    "rope_factor": 1.0,
    "mscale": 1.0,
}
_OPTIONAL_NUMBERS = ("polynorm_bias_clamp", "load_balance_coeff")
_SWITCHES: Mapping[str, bool] = {"route_norm": False, "polynorm_sigmoid_weight": True}
# What the released models have, and nothing else is computed. The vendor's defaults differ, so that a config has to say
# so, unless it is one of our own.
_FIXED: Mapping[str, Any] = {
    "attention_cls": "gdla",
    "diff_v2": True,
    "elementwise_attn_output_gate": True,
    "score_func": "sigmoid",
    "hidden_act": "poly_norm",
    "mhc_enabled": True,
    "num_shared_experts": 1,
}
# What they have, and is so where a config says nothing.
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
    """Adapter of a Motif-3 config.json.

    Raises:
        CheckpointError: sizes are missing or contradict each other, or settings are ones that no released model has;
            all are named.

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
        raise CheckpointError(f"config.json: {'; '.join(problems)}, which is not computed for Motif-3")
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
    """The settings that a Llama has none of, and what is wrong with them."""
    is_ours = "spec" in config
    own: dict[str, Any] = {key: config.get(key) for key in _SIZES}
    own |= {key: config.get(key, default) for key, default in _DEFAULT_SIZES.items()}
    own |= {"qk_rope_head_dim": config.get("qk_rope_head_dim", sizes["head_dim"] // 2)}
    own |= {"v_head_dim": config.get("v_head_dim", sizes["head_dim"])}
    problems = [f"{key} is {size!r}, not a number from 1 on" for key, size in own.items() if not _counts(size, 1)]
    counts = {key: config.get(key, default) for key, default in _COUNTS.items()}
    if is_ours:
        # A model that was saved has no layers that it does not run.
        counts["num_nextn_predict_layers"] = 0
    problems += [f"{key} is {n!r}, not a number from 0 on" for key, n in counts.items() if not _counts(n, 0)]
    window = config.get("sliding_window") if config.get("use_sliding_window", is_ours) else None
    if window is not None and not _counts(window, 1):
        problems.append(f"sliding_window is {window!r}, not a number from 1 on")
    if not is_ours and "use_sliding_window" not in config and config.get("sliding_window") is not None:
        problems.append("sliding_window is stated without use_sliding_window")
    numbers = {key: config.get(key, default) for key, default in _NUMBERS.items()}
    optional = {key: config.get(key) for key in _OPTIONAL_NUMBERS}
    by_layer = config.get("polynorm_output_scale_per_layer") or {}
    stated = {**numbers, **{key: value for key, value in optional.items() if value is not None}}
    if isinstance(by_layer, Mapping):
        stated |= {f"polynorm_output_scale_per_layer of {layer}": value for layer, value in by_layer.items()}
    else:
        problems.append(f"polynorm_output_scale_per_layer is {by_layer!r}, not an object")
    problems += [f"{key} is {x!r}, not a number" for key, x in stated.items() if not _is_finite(x)]
    switches = {key: config.get(key, default) for key, default in _SWITCHES.items()}
    problems += [f"{key} is {x!r}, neither true nor false" for key, x in switches.items() if not isinstance(x, bool)]
    fixed = {key: config.get(key, x if is_ours else None) for key, x in _FIXED.items()}
    problems += [f"{key} is {fixed[key]!r}, not {x!r}" for key, x in _FIXED.items() if fixed[key] != x]
    problems += [
        f"{key} is {config[key]!r}, not {known[0]!r}"
        for key, known in _NEUTRAL.items()
        if config.get(key) not in (None, *known)
    ]
    own |= counts | numbers | optional | switches
    return own | {"sliding_window": window, "polynorm_output_scale_per_layer": by_layer}, problems


def _contradictions(sizes: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    heads, noises, kv_heads = sizes["num_attention_heads"], own["num_noise_heads"], sizes["num_key_value_heads"]
    problems = []
    if heads % noises or heads == noises:
        problems.append(f"num_noise_heads {noises} does not divide num_attention_heads {heads} into groups")
    if noises != kv_heads:
        problems.append(f"num_noise_heads {noises} is not num_key_value_heads {kv_heads}")
    rope = own["qk_rope_head_dim"]
    if rope % 2 or rope >= sizes["head_dim"]:
        problems.append(f"qk_rope_head_dim {rope} is no even part of head_dim {sizes['head_dim']}")
    if own["experts_top_k"] > own["num_experts"]:
        problems.append(f"experts_top_k {own['experts_top_k']} is more than num_experts {own['num_experts']}")
    return problems


def _counts(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_finite(value: object) -> bool:
    return is_a(value, (int, float)) and math.isfinite(float(str(value)))
