"""Rotary settings of a config.json, what it leaves out filled in as transformers does."""

from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.model.adapters.base import is_a, not_valid
from diffquant.model.transformer import TransformerArchitecture

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
    "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
# Those of them that a config may state as null, which leaves them out.
_OPTIONAL = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_FACTORS = ("short_factor", "long_factor")
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
        # Beside the rotary settings it counts for more than among them: Phi-3 has it there.
        beside = config.get("original_max_position_embeddings")
        if beside is not None:
            rope["original_max_position_embeddings"] = beside
        rope.setdefault("original_max_position_embeddings", positions)
    if rope_type == "yarn" and "factor" in rope and rope["factor"] is None:
        original = rope["original_max_position_embeddings"]
        rope["factor"] = positions / original if _is_positive(original) else None
    missing = [key for key in ("rope_theta", *ROPE_TYPES.get(rope_type, ())) if rope.get(key) is None]
    if missing:
        raise CheckpointError(f"{not_valid(config)}: its rope_type {rope_type!r} lacks {', '.join(missing)}")
    wrong = [f"{key} is {rope[key]!r}" for key in rope if not _can_be(key, rope[key])]
    if wrong:
        raise CheckpointError(f"{not_valid(config)}: of its rotary settings {', '.join(wrong)}")
    if rope_type != "proportional" and rope.get("partial_rotary_factor") not in (None, 1):
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']}, and only rope_type 'proportional' "
            "turns a part of each head; where the model was trained turning all of it, set the factor to 1"
        )
    return rope


def check_angles(architecture: TransformerArchitecture) -> None:
    """Check that the rotary settings of a whole model give an angle to each pair of channels of its heads.

    Raises:
        CheckpointError: they do not.
    """
    rope, pairs_of_channels = architecture.rope_parameters, architecture.head_dim // 2
    rope_type, theta = rope["rope_type"], rope["rope_theta"]
    problems = []
    if rope_type == "longrope":
        problems += [
            f"{key} has {len(rope[key])} numbers for the {pairs_of_channels} pairs of channels of a head"
            for key in _FACTORS
            if len(rope[key]) != pairs_of_channels
        ]
        if rope["original_max_position_embeddings"] <= 1:
            problems.append("longrope was trained on one position")
    if rope_type == "yarn" and theta == 1:
        problems.append("yarn needs angles that differ, and rope_theta is 1")
    if rope_type == "dynamic" and pairs_of_channels == 1:
        problems.append("dynamic needs heads of more than two channels")
    if problems:
        raise CheckpointError(f"config.json: angles cannot be computed: {'; '.join(problems)}")


def _can_be(key: str, value: object) -> bool:
    """Whether a rotary setting has a value that angles can be computed with."""
    if value is None and key in _OPTIONAL:
        return True
    if key in _FACTORS:
        return isinstance(value, list) and all(_is_positive(number) for number in value)
    if key in _POSITIVE:
        return _is_positive(value)
    return value is None or isinstance(value, str | int | float)


def _is_positive(value: object) -> bool:
    return is_a(value, (int, float)) and 0 < float(str(value)) < _ENDLESS
