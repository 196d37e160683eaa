"""Reads sizes and settings of a config.json, with the defaults of its library.

transformers' config classes could read them too, but importing them takes seconds; tests check that results agree.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.activations import find_activation
from diffquant.model.adapters.base import count_pairs, has_type, invalid_config_prefix
from diffquant.model.architecture import DEFAULTS, TransformerArchitecture

_THETA = 10000.0

# Settings that each rope_type needs, besides "rope_theta".
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
# Those whose angles depend on the length of the longest sequence that is read.
MOVING_ROPE = ("dynamic", "longrope")
# Raise it when a change alters stored results of models with only these types, which are then measured again.
RESULT_VERSION = 1
# Settings that must be positive and below _ENDLESS, so that angles and positions fit in float32.
_POSITIVE = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
# Settings that may be null, which is the same as leaving them out.
_OPTIONAL = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_FACTORS = ("short_factor", "long_factor")
_ENDLESS = 1e18
# Types that also need the context length before it was extended.
_STRETCHED = ("llama3", "yarn", "longrope")


def read_rope(config: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Read the rotary settings of a config.json in transformers' standard form, converting older spellings.

    Args:
        config: content of config.json.
        positions: `max_position_embeddings` of the model.

    Raises:
        CheckpointError: a setting is missing, invalid or not supported.

    Source: transformers/modeling_rope_utils.py, RotaryEmbeddingConfigMixin.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{invalid_config_prefix(config)}: rope_parameters is {stated!r}, not an object")
    rope = dict(stated)
    rope.setdefault("rope_theta", config.get("rope_theta", _THETA))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    rope_type = rope.setdefault("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ("default", *ROPE_TYPES):
        raise CheckpointError(f"config.json: rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    if rope_type in _STRETCHED:
        # At the top level of config.json, as in Phi-3, it overrides the value inside the rotary settings.
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            rope["original_max_position_embeddings"] = outside
        rope.setdefault("original_max_position_embeddings", positions)
    if rope_type == "yarn" and "factor" in rope and rope["factor"] is None:
        original = rope["original_max_position_embeddings"]
        rope["factor"] = positions / original if _is_positive(original) else None
    missing = [key for key in ("rope_theta", *ROPE_TYPES.get(rope_type, ())) if rope.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{invalid_config_prefix(config)}: its rope_type {rope_type!r} lacks {', '.join(missing)}"
        )
    wrong = [f"{key} is {rope[key]!r}" for key in rope if not _is_valid(key, rope[key])]
    if wrong:
        raise CheckpointError(f"{invalid_config_prefix(config)}: invalid rotary settings: {', '.join(wrong)}")
    if rope_type != "proportional" and rope.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']}, and only rope_type 'proportional' "
            "rotates a part of each head; if the model was trained rotating all of it, set the factor to 1"
        )
    return rope


def check_rope_angles(architecture: TransformerArchitecture) -> None:
    """Check that a model's rotary settings give an angle for each pair of channels of a head.

    Raises:
        CheckpointError: the number of angles is wrong, or they cannot be computed.
    """
    rope, pairs_of_channels = architecture.rope_parameters, architecture.head_dim // 2
    rope_type, theta = rope["rope_type"], rope["rope_theta"]
    problems = []
    if rope_type == "longrope":
        problems += [
            f"{key} has {len(rope[key])} numbers, not {pairs_of_channels}, one for each two channels of a head"
            for key in _FACTORS
            if len(rope[key]) != pairs_of_channels
        ]
        if rope["original_max_position_embeddings"] <= 1:
            problems.append("longrope needs original_max_position_embeddings above 1")
    if rope_type == "yarn" and theta == 1:
        problems.append("with rope_theta 1 all angles are equal, which yarn does not support")
    if rope_type == "dynamic" and pairs_of_channels == 1:
        problems.append("dynamic needs heads of more than two channels")
    if problems:
        raise CheckpointError(f"config.json: angles cannot be computed: {'; '.join(problems)}")


def _is_valid(key: str, value: object) -> bool:
    """Return whether a value is allowed for a rotary setting."""
    if value is None and key in _OPTIONAL:
        return True
    if key in _FACTORS:
        return isinstance(value, list) and all(_is_positive(number) for number in value)
    if key in _POSITIVE:
        return _is_positive(value)
    return value is None or isinstance(value, str | int | float)


def _is_positive(value: object) -> bool:
    return has_type(value, (int, float)) and 0 < float(str(value)) < _ENDLESS


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Upper limit of any size of a model; torch itself accepts sizes below 2^63.
_LARGEST = 2**40
# Defaults of LlamaConfig and DiffLlamaConfig; SIZES must be stated.
LLAMA: Mapping[str, Any] = {
    **{key: DEFAULTS[key] for key in DEFAULTS if key not in SIZES},
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DIFFLLAMA = {**LLAMA, "rms_norm_eps": 1e-5}

_HINTS = get_type_hints(TransformerArchitecture)


def _types(key: str) -> tuple[type, ...]:
    """Return the types allowed for a field; NoneType is one if the field may be derived from other sizes."""
    hint = _HINTS[key] | None if LLAMA[key] is None else _HINTS[key]
    return tuple(get_origin(kind) or kind for kind in get_args(hint) or (hint,))


_TYPES = {key: _types(key) for key in LLAMA}


def read_sizes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read all fields of a `TransformerArchitecture` except its `diff_spec`.

    Args:
        config: content of config.json.
        defaults: default of each field that config.json may leave out.

    Raises:
        CheckpointError: sizes are missing, settings have a wrong type or contradict each other (the message lists all),
            or the activation is not supported.
    """
    sizes = {key: config.get(key, defaults.get(key)) for key in (*SIZES, *_TYPES)}
    missing = [key for key in SIZES if not has_type(sizes[key], (int,)) or sizes[key] < 1]
    if missing:
        raise CheckpointError(f"config.json lacks a positive {', '.join(missing)}")
    wrong = [
        f"{key} is {sizes[key]!r}, not {' or '.join('null' if t is type(None) else t.__name__ for t in types)}"
        for key, types in _TYPES.items()
        if not has_type(sizes[key], types)
    ]
    if wrong:
        raise CheckpointError(f"{invalid_config_prefix(config)}: {'; '.join(wrong)}")
    _check_ranges(config, sizes)
    find_activation(sizes["hidden_act"])
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes | {"rope_parameters": read_rope(config, sizes["max_position_embeddings"])}


def _check_ranges(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that numbers are in ranges for which a model can be built and run.

    Raises:
        CheckpointError: some are not; the message lists all.
    """
    positive = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    wrong = [key for key in (*SIZES, *positive) if sizes[key] is not None and not 0 < sizes[key] < _LARGEST]
    wrong += [key for key in ("rms_norm_eps", "initializer_range") if not 0 <= sizes[key] < math.inf]
    pad = sizes["pad_token_id"]
    if pad is not None and not -sizes["vocab_size"] <= pad < sizes["vocab_size"]:
        wrong.append("pad_token_id")
    ends = sizes["eos_token_id"]
    if isinstance(ends, list) and not all(has_type(token, (int,)) for token in ends):
        wrong.append("eos_token_id")
    if wrong:
        raise CheckpointError(
            f"{invalid_config_prefix(config)}: {', '.join(f'{key} is {sizes[key]!r}' for key in wrong)}"
        )


def check_width(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that the number of heads divides the hidden width, which LlamaConfig requires even if `head_dim` is given.

    Raises:
        CheckpointError: the hidden width is not a multiple of the number of heads.
    """
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if width % heads:
        raise CheckpointError(
            f"{invalid_config_prefix(config)}: hidden_size {width} is not a multiple of num_attention_heads {heads}"
        )


def read_eps(config: Mapping[str, Any], key: str) -> float:
    """Read the epsilon of a norm, 1e-5 by default.

    Raises:
        CheckpointError: the value is not a float of at least 0.
    """
    eps = config.get(key, 1e-5)
    if not isinstance(eps, float) or not 0 <= eps < math.inf:
        raise CheckpointError(f"{invalid_config_prefix(config)}: {key} is {eps!r}; it must be a float of at least 0")
    return eps


def v1_spec(sizes: Mapping[str, Any], **overrides: Any) -> DiffSpec:
    """Return the specification of DIFF V1: two heads per pair, values twice as wide as keys.

    Args:
        sizes: sizes as `read_sizes` returns them.
        overrides: further fields of the specification. `pairs` and `kv_pairs` replace the numbers from `sizes`.

    Raises:
        CheckpointError: a number of heads is odd, or `overrides` contradict the sizes.
    """
    counts = {"pairs": "num_attention_heads", "kv_pairs": "num_key_value_heads"}
    overrides |= {field: count_pairs(sizes[key], key) for field, key in counts.items() if field not in overrides}
    width = sizes["head_dim"]
    return DiffSpec(head_dim=width, value_dim=2 * width, lam="exp", scale_by_init=True, **overrides)
