"""Sizes and rotary settings of a config.json, what it leaves out filled in as its library does.

transformers' own config classes would read them, but importing them takes seconds; tests hold these to those.
"""

import math
from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.mlp import activation_named

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Defaults of LlamaConfig and DiffLlamaConfig; SIZES must be stated.
LLAMA: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
# Beyond it no size of a model lies, and beyond 2^63 none that torch takes.
_LARGEST = 2**40
DIFFLLAMA = {**LLAMA, "rms_norm_eps": 1e-5}

_TYPES: Mapping[str, tuple[type, ...]] = {
    "num_key_value_heads": (int, type(None)),
    "head_dim": (int, type(None)),
    "hidden_act": (str,),
    "max_position_embeddings": (int,),
    "initializer_range": (float,),
    "rms_norm_eps": (float,),
    "pad_token_id": (int, type(None)),
    "bos_token_id": (int, type(None)),
    "eos_token_id": (int, list, type(None)),
    "tie_word_embeddings": (bool,),
    "attention_bias": (bool,),
    "mlp_bias": (bool,),
}
_THETA = 10000.0

# Settings that a rope_type cannot be computed without, besides "rope_theta".
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
# Settings that are positive numbers; from _ENDLESS on float32 has no room for angles and positions.
_POSITIVE = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "partial_rotary_factor",
)  # fmt: skip
_ENDLESS = 1e18
# Types that also ask how far the model saw before it was stretched.
_STRETCHED = ("llama3", "yarn", "longrope")


def read_sizes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a `TransformerArchitecture` but its `diff_spec`.

    Args:
        config: config.json.
        defaults: value of each field that the config may leave out.

    Raises:
        CheckpointError: sizes are missing, settings are of a wrong type or contradict each other (all are named), or
            the activation is not computed.
    """
    sizes = {key: config.get(key, defaults.get(key)) for key in (*SIZES, *_TYPES)}
    missing = [key for key in SIZES if not _is_a(sizes[key], (int,)) or sizes[key] < 1]
    if missing:
        raise CheckpointError(f"config.json lacks a positive {', '.join(missing)}")
    wrong = [
        f"{key} is {sizes[key]!r}, not {' or '.join('null' if t is type(None) else t.__name__ for t in types)}"
        for key, types in _TYPES.items()
        if not _is_a(sizes[key], types)
    ]
    if wrong:
        raise CheckpointError(f"{_not_valid(config)}: {'; '.join(wrong)}")
    _check_ranges(config, sizes)
    activation_named(sizes["hidden_act"])
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes | {"rope_parameters": _read_rope(config, sizes["max_position_embeddings"])}


def _check_ranges(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that numbers lie where a model can be built and computed.

    Raises:
        CheckpointError: some do not; all are named.
    """
    positive = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    wrong = [key for key in (*SIZES, *positive) if sizes[key] is not None and not 0 < sizes[key] < _LARGEST]
    wrong += [key for key in ("rms_norm_eps", "initializer_range") if not 0 <= sizes[key] < math.inf]
    pad = sizes["pad_token_id"]
    if pad is not None and not -sizes["vocab_size"] <= pad < sizes["vocab_size"]:
        wrong.append("pad_token_id")
    if wrong:
        raise CheckpointError(f"{_not_valid(config)}: {', '.join(f'{key} is {sizes[key]!r}' for key in wrong)}")


def check_width(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that heads divide the width, as LlamaConfig has it whatever `head_dim` is.

    Raises:
        CheckpointError: the heads do not divide it.
    """
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if width % heads:
        raise CheckpointError(
            f"{_not_valid(config)}: hidden_size {width} is not a multiple of num_attention_heads {heads}"
        )


def _read_rope(config: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Rotary settings of a config.json, old spellings brought to the new one.

    Source: transformers/modeling_rope_utils.py, RotaryEmbeddingConfigMixin.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{_not_valid(config)}: rope_parameters is {stated!r}, not an object")
    rope = dict(stated)
    rope.setdefault("rope_theta", config.get("rope_theta", _THETA))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    rope_type = rope.setdefault("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ("default", *ROPE_TYPES):
        raise CheckpointError(f"config.json: rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    if rope_type in _STRETCHED:
        rope.setdefault("original_max_position_embeddings", positions)
    missing = [key for key in ("rope_theta", *ROPE_TYPES.get(rope_type, ())) if rope.get(key) is None]
    if missing:
        raise CheckpointError(f"{_not_valid(config)}: its rope_type {rope_type!r} lacks {', '.join(missing)}")
    wrong = [f"{key} is {rope[key]!r}" for key in rope if not _can_be(key, rope[key])]
    if wrong:
        raise CheckpointError(f"{_not_valid(config)}: of its rotary settings {', '.join(wrong)}")
    return rope


def _can_be(key: str, value: object) -> bool:
    """Whether a rotary setting has a value that angles can be computed with."""
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(_is_positive(number) for number in value)
    if key in _POSITIVE:
        return _is_positive(value)
    return value is None or isinstance(value, str | int | float)


def _is_positive(value: object) -> bool:
    return _is_a(value, (int, float)) and 0 < float(str(value)) < _ENDLESS


def _is_a(value: object, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types; unlike Python's, our bool is no int."""
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _not_valid(config: Mapping[str, Any]) -> str:
    return f"config.json is not a valid {config.get('model_type')} configuration"
