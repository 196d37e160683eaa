"""Rotary settings of a config.json, what it leaves out filled in as transformers does."""

from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.adapters.base import is_a, not_valid

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


def read_rope(config: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """Rotary settings of a config.json, old spellings brought to the new one.

    Source: transformers/modeling_rope_utils.py, RotaryEmbeddingConfigMixin.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{not_valid(config)}: rope_parameters is {stated!r}, not an object")
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
        raise CheckpointError(f"{not_valid(config)}: its rope_type {rope_type!r} lacks {', '.join(missing)}")
    wrong = [f"{key} is {rope[key]!r}" for key in rope if not _can_be(key, rope[key])]
    if wrong:
        raise CheckpointError(f"{not_valid(config)}: of its rotary settings {', '.join(wrong)}")
    return rope


def _can_be(key: str, value: object) -> bool:
    """Whether a rotary setting has a value that angles can be computed with."""
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(_is_positive(number) for number in value)
    if key in _POSITIVE:
        return _is_positive(value)
    return value is None or isinstance(value, str | int | float)


def _is_positive(value: object) -> bool:
    return is_a(value, (int, float)) and 0 < float(str(value)) < _ENDLESS
