"""The exact ways from one member of the family to another, which computes the same function.

Two are known: unilm's DIFF V1 as Hugging Face `diffllama`, and a plain Llama as DIFF V2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.model.adapters import Adapter
from diffquant.source.source import Source

# A source tensor's rows [rows, ...] -> the target's.
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Origin:
    """The origin of a target's tensor: a source tensor, and what changes on the way.

    Attributes:
        source: name of the tensor to read; None for zeros.
        rows: index in the source of each output row; None for the same rows.
        change: function of the rows that were read; None to leave them as they are.
    """

    source: str | None
    rows: Tensor | None = None
    change: Change | None = None


@dataclass(frozen=True)
class Way:
    """A way from one model_type to another.

    Attributes:
        source_type: model_type that it begins with.
        config: function from the source to the target's config.json.
        origin: function from the source, the target's adapter and the name of a tensor of the target to its origin.
        card: what changes on the way, for the model card.
    """

    source_type: str
    config: Callable[[Source], dict[str, Any]]
    origin: Callable[[Source, Adapter, str], Origin]
    card: str


def way_to(target: str, source: Source) -> Way:
    """The way to a target.

    Raises:
        UsageError: no exact way leads from this source there.
    """
    if target not in WAYS:
        raise UsageError(f"cannot convert to {target!r}; choose from {', '.join(WAYS)}")
    model_type = source.model_type
    if model_type != WAYS[target].source_type:
        ways = ", ".join(f"{way.source_type} to {end}" for end, way in WAYS.items())
        kind = ", a plain Transformer," if source.spec.maps == 1 else ""
        raise UsageError(f"cannot convert {model_type}{kind} to {target} exactly; choose from {ways}")
    return WAYS[target]


# Where a config.json leaves these out, source and target have different defaults.
_RESOLVED = (
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "attention_bias",
    "rope_parameters",
)
# What rope_parameters, resolved, has in it.
_ROTARY = ("rope_theta", "rope_scaling", "rope_angles", "partial_rotary_factor", "original_max_position_embeddings")


def _diffllama_config(source: Source) -> dict[str, Any]:
    ours, spec = source.transformer("convert"), source.spec
    problems = []
    if not math.isclose(ours.rms_norm_eps, spec.post_norm_eps, rel_tol=1e-6):
        problems.append(
            f"rms_norm_eps is {ours.rms_norm_eps}, while subln's is {spec.post_norm_eps} and diffllama has one for both"
        )
    if ours.mlp_bias:
        problems.append("mlp_bias is true, and diffllama's MLP has none")
    if problems:
        raise CheckpointError(f"no diffllama computes what {source.path} does: {'; '.join(problems)}")
    dropped = ("rope_style", "gqa_pairing", "attention_dropout", "auto_map", *_ROTARY)
    return _carried(source, dropped) | {
        "model_type": "diffllama",
        "architectures": ["DiffLlamaForCausalLM"],
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_dim,
    }


def _diff_v2_config(source: Source) -> dict[str, Any]:
    spec = source.spec
    return _carried(source, ("architectures", "auto_map", *_ROTARY)) | {
        "model_type": "diff_v2",
        "num_attention_heads": 2 * spec.pairs,
        "num_key_value_heads": spec.kv_pairs,
        "head_dim": spec.head_dim,
        "rope_style": "half",
    }


def _carried(source: Source, dropped: tuple[str, ...]) -> dict[str, Any]:
    """The source's config without what does not apply, what it left to defaults spelled out."""
    carried = {key: value for key, value in source.checkpoint.config.items() if key not in dropped}
    return carried | {key: getattr(source.architecture, key) for key in _RESOLVED}


def _diffllama_origin(source: Source, target: Adapter, name: str) -> Origin:
    """Origin under a change of layout: heads from adjacent to halves, rotated rows from interleaved to half.

    The norm subln, which diffllama has without a weight, goes into o_proj's columns.
    """
    spec, source_name = source.spec, source.adapter.source_name(name)
    if name.endswith("o_proj.weight") and spec.post_norm == "affine":
        subln = source.checkpoint.read(name.replace("o_proj", "subln"))
        return Origin(source_name, change=_scaled(subln.repeat(spec.pairs)))
    return Origin(source_name, source.adapter.rows_as(target.architecture.diff_spec.layout, name))


def _diff_v2_origin(source: Source, _target: Adapter, name: str) -> Origin:
    """Origin where both maps are the Llama's one: each query head appears twice; λ is ½, so the output is doubled."""
    spec, projection = source.spec, name.split(".")[-2]
    if projection == "lambda_proj":
        return Origin(None)
    if projection == "q_proj":
        heads = torch.arange(spec.pairs * spec.head_dim).view(spec.pairs, spec.head_dim)
        return Origin(name, heads.repeat_interleave(2, dim=0).flatten())
    if name.endswith("o_proj.weight"):
        return Origin(name, change=_scaled(torch.tensor(2.0)))
    return Origin(name)


def _scaled(factor: Tensor) -> Change:
    """Multiplication by a factor (of each column, or one)."""
    return lambda rows: rows.double() * factor.double()


WAYS = {
    "diffllama": Way(
        "diff_v1",
        _diffllama_config,
        _diffllama_origin,
        "heads are reordered, the per-pair norm's weight is folded into o_proj.",
    ),
    "diff-v2": Way(
        "llama",
        _diff_v2_config,
        _diff_v2_origin,
        "every query head appears twice, so that a pair's two maps start equal, λ is ½ everywhere and o_proj is "
        "doubled. It is a starting point for training, not a trained DIFF model.",
    ),
}
