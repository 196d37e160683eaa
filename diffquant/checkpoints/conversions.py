"""Converts a model exactly to another architecture of the family, which computes the same function.

Two conversions are supported: unilm's DIFF V1 to Hugging Face `diffllama`, and a plain Llama to DIFF V2.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError, UsageError
from diffquant.model.adapters import Adapter

# A source tensor's rows [rows, ...] -> the target's.
Change = Callable[[Tensor], Tensor]


# (name of a source tensor, or None if the target's tensor is zeros; for each target row the index of its source row, or
# None if the rows keep their order; function that changes the rows, or None if they do not change)
Origin = tuple[str | None, Tensor | None, Change | None]


def check_conversion(target: str, source: Source) -> None:
    """Check that a source can be converted to a target.

    Raises:
        UsageError: this source cannot be converted exactly to the target.
    """
    if target not in _SOURCE_TYPES:
        raise UsageError(f"cannot convert to {target!r}; choose from {', '.join(_SOURCE_TYPES)}")
    model_type = source.model_type
    if model_type != _SOURCE_TYPES[target]:
        ways = ", ".join(f"{begin} to {end}" for end, begin in _SOURCE_TYPES.items())
        kind = ", a plain Transformer," if source.spec.maps == 1 else ""
        raise UsageError(f"cannot convert {model_type}{kind} to {target} exactly; choose from {ways}")


def convert_config(target: str, source: Source) -> dict[str, Any]:
    """Make the target's config.json.

    Raises:
        CheckpointError: the source has settings that the target has no place for.
    """
    return _diffllama_config(source) if target == "diffllama" else _diff_v2_config(source)


def find_origin(target: str, source: Source, adapter: Adapter, name: str) -> Origin:
    """Return the source tensor, row order and change that make a tensor of the target; `adapter` is the target's."""
    return _diffllama_origin(source, adapter, name) if target == "diffllama" else _diff_v2_origin(source, name)


# Settings that are always written, since their defaults differ between source and target.
_RESOLVED = (
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    "attention_bias", "rope_parameters",
)  # fmt: skip
# Settings that the resolved rope_parameters contains.
_ROTARY = ("rope_theta", "rope_scaling", "rope_angles", "partial_rotary_factor", "original_max_position_embeddings")


def _diffllama_config(source: Source) -> dict[str, Any]:
    ours, spec = source.transformer("convert"), source.spec
    problems = []
    if not math.isclose(ours.rms_norm_eps, spec.post_norm_eps, rel_tol=1e-6):
        problems.append(
            f"rms_norm_eps is {ours.rms_norm_eps}, and subln's {spec.post_norm_eps}, but diffllama has one for both"
        )
    if ours.mlp_bias:
        problems.append("mlp_bias is true, but diffllama's MLP has no biases")
    if problems:
        raise CheckpointError(f"{source.path} cannot be converted to diffllama: {'; '.join(problems)}")
    dropped = ("rope_style", "gqa_pairing", "attention_dropout", "auto_map", *_ROTARY)
    return _carry_config(source, dropped) | {
        "model_type": "diffllama",
        "architectures": ["DiffLlamaForCausalLM"],
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_dim,
    }


def _diff_v2_config(source: Source) -> dict[str, Any]:
    spec = source.spec
    return _carry_config(source, ("architectures", "auto_map", *_ROTARY)) | {
        "model_type": "diff_v2",
        "num_attention_heads": 2 * spec.pairs,
        "num_key_value_heads": spec.kv_pairs,
        "head_dim": spec.head_dim,
        "rope_style": "half",
    }


def _carry_config(source: Source, dropped: tuple[str, ...]) -> dict[str, Any]:
    """Return the source's config without keys that do not apply, with its defaults written out."""
    carried = {key: value for key, value in source.checkpoint.config.items() if key not in dropped}
    return carried | {key: getattr(source.architecture, key) for key in _RESOLVED}


def _diffllama_origin(source: Source, target: Adapter, name: str) -> Origin:
    """Find the origin under a change of layout: heads from adjacent to halves, rows from interleaved to half.

    The weight of the norm subln, which diffllama's norm lacks, is multiplied into o_proj's columns.
    """
    spec, source_name = source.spec, source.adapter.source_name(name)
    if name.endswith("o_proj.weight") and spec.post_norm == "affine":
        subln = source.checkpoint.read(name.replace("o_proj", "subln"))
        return source_name, None, _scale(subln.repeat(spec.pairs))
    return source_name, source.adapter.rows_as(target.architecture.diff_spec.layout, name), None


def _diff_v2_origin(source: Source, name: str) -> Origin:
    """Find the origin if both maps are the Llama's: query heads appear twice, λ is ½, the output is doubled."""
    spec, projection = source.spec, name.split(".")[-2]
    if projection == "lambda_proj":
        return None, None, None
    if projection == "q_proj":
        heads = torch.arange(spec.pairs * spec.head_dim).view(spec.pairs, spec.head_dim)
        return name, heads.repeat_interleave(2, dim=0).flatten(), None
    if name.endswith("o_proj.weight"):
        return name, None, _scale(torch.tensor(2.0))
    return name, None, None


def _scale(factor: Tensor) -> Change:
    """Return a function that multiplies rows by a factor, or by one factor per column."""
    return lambda rows: rows.double() * factor.double()


_SOURCE_TYPES = {"diffllama": "diff_v1", "diff-v2": "llama"}
# Descriptions of the changes for the model card.
CARDS = {
    "diffllama": "heads are reordered, the per-pair norm's weight is folded into o_proj.",
    "diff-v2": "every query head appears twice, so that a pair's two maps start equal, λ is ½ everywhere and o_proj is "
    "doubled. It is a starting point for training, not a trained DIFF model.",
}
