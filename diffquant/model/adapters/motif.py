"""Adapter for Motif Technologies' models: DIFF V1, adjacent heads, λ_init shifted by a layer, PolyNorm in the MLP.

Three models share one model_type. Motif-2.6B has ordinary pairs. Motif-2-12.7B has `num_noise_heads` in its config:
each group of signal heads shares one noise head, the last head of the group. Motif-3 has `kv_lora_rank` or `diff_v2`
and is a different architecture, read by `motif3`.
"""

from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.adapters.base import Adapter, refuse_windows, register
from diffquant.model.adapters.motif3 import OWN_KEYS, read_motif3
from diffquant.model.adapters.sizes import LLAMA, check_width, read_eps, read_sizes, v1_spec
from diffquant.model.architecture import TransformerArchitecture

MOTIF: Mapping[str, Any] = {
    **LLAMA,
    "hidden_act": "poly_norm",
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}


@register("motif", supports_windows=True)
def read_motif(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `Motif` config.json.

    Raises:
        CheckpointError: sizes contradict each other, or no released model is known to have these settings.

    Source: MotifTechnologies/vllm, vllm/model_executor/models/motif.py; arXiv 2510.06949 for the groups.
    """
    if any(config.get(key) for key in OWN_KEYS):
        return read_motif3(config)
    refuse_windows(config)
    _refuse_settings(config)
    bias = bool(config.get("use_bias"))
    sizes = read_sizes(config | {"attention_bias": bias, "mlp_bias": bias}, MOTIF)
    _refuse_stretched(sizes["rope_parameters"])
    is_grouped = config.get("num_noise_heads") is not None
    if not is_grouped and config.get("k_ratio") not in (None, 1):
        raise CheckpointError(
            f"config.json: k_ratio is {config['k_ratio']!r} without num_noise_heads, which no Motif model has"
        )
    if not is_grouped:
        check_width(config, sizes)
    groups = _count_groups(config, sizes) if is_grouped else {}
    eps = read_eps(config, "attn_rms_norm_eps")
    spec = v1_spec(sizes, **groups, lam_init_offset=-1, post_norm="affine", post_norm_eps=eps)
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))


def _count_groups(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, int]:
    """Compute the numbers of pairs, KV pairs and signal heads per noise head of Motif-2-12.7B."""
    heads, noises, kv_heads = sizes["num_attention_heads"], config["num_noise_heads"], sizes["num_key_value_heads"]
    problems = []
    if type(noises) is not int or not 0 < noises < heads or heads % noises:
        problems.append(f"num_noise_heads {noises!r} does not divide num_attention_heads {heads} into groups")
    if config.get("k_ratio", 1) != 1:
        problems.append(f"k_ratio is {config['k_ratio']!r}; only one signal key per noise key is supported")
    if kv_heads % 2:
        problems.append(f"num_key_value_heads {kv_heads} is not an even number")
    elif not problems and noises % (kv_heads // 2):
        problems.append(f"num_noise_heads {noises} is not a multiple of half of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None:
        problems.append("head_dim is missing and cannot be derived from the other sizes")
    if problems:
        raise CheckpointError(f"config.json is not a valid Motif configuration: {'; '.join(problems)}")
    return {"pairs": heads - noises, "kv_pairs": kv_heads // 2, "signals_per_noise": heads // noises - 1}


def _refuse_settings(config: dict[str, Any]) -> None:
    """Refuse settings that no published model uses."""
    wrong = [f"{key} is {config[key]!r}" for key in ("fused_rope", "qkv_bias", "attention_bias") if config.get(key)]
    if wrong:
        raise CheckpointError(f"config.json: {', '.join(wrong)}, which is not supported for Motif; it must be false")


def _refuse_stretched(rope: Mapping[str, Any]) -> None:
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"config.json: rope_scaling has type {rope['rope_type']!r}, which was not checked against Motif's "
            "code; set rope_scaling to null to run the model at the length it was trained for"
        )
