"""Converts a model to another architecture, or rotates, smooths or scales its weights, without changing its function.

Two conversions change the architecture: unilm's DIFF V1 to Hugging Face `diffllama`, and a plain Llama to DIFF V2. The
others keep the architecture of any model that `DiffTransformer` runs: rotated weights spread outliers over all
channels, smoothed inputs move outliers into the weights' columns, and scaled columns round less where inputs are large.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.row_stream import check_rows_finite
from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError, UsageError
from diffquant.family.heads import HeadLayout
from diffquant.model.adapters import Adapter
from diffquant.recipe.numbers.simulation import make_rotation_matrix
from diffquant.support.names import option_name

# The model_type that each conversion to another architecture reads, and the conversions that keep the model_type.
_SOURCE_TYPES = {"diffllama": "diff_v1", "diff-v2": "llama"}
ROTATED, SMOOTHED, SCALED = SAME_TYPE = ("rotated", "smoothed", "scaled")
# Conversions that divide inputs of linear layers by factors, and what each is for.
FACTORED = {SMOOTHED: "8-bit activations", SCALED: "4-bit weights"}

# A source tensor's rows [rows, ...] -> the target's.
Change = Callable[[Tensor], Tensor]
# (name of a source tensor, or None if the target's tensor is zeros; for each target row the index of its source row, or
# a float64 matrix [target rows, source rows] to multiply the source by, or a float64 factor of each row, or None if the
# rows keep their order; function that then changes the rows, or None if they do not change)
Origin = tuple[str | None, Tensor | None, Change | None]


def check_conversion(target: str, source: Source) -> None:
    """Check that a source can be converted.

    Args:
        target: "diffllama", "diff-v2", "rotated", "smoothed" or "scaled".

    Raises:
        UsageError: this source cannot be converted exactly to the target.
        CheckpointError: the source has layers whose rotation or scaling is unknown.
    """
    if target not in (known := (*_SOURCE_TYPES, *SAME_TYPE)):
        raise UsageError(f"cannot convert to {target!r}; choose from {', '.join(known)}")
    if target in SAME_TYPE:
        source.require_transformer(f"convert ({option_name('to', target)})")
        return
    model_type = source.model_type
    if model_type != _SOURCE_TYPES[target]:
        ways = ", ".join(f"{begin} to {end}" for end, begin in _SOURCE_TYPES.items())
        kind = ", a plain Transformer," if source.spec.maps == 1 else ""
        raise UsageError(f"cannot convert {model_type}{kind} to {target} exactly; choose from {ways}")


def convert_config(target: str, source: Source) -> dict[str, Any]:
    """Return the content of the converted checkpoint's config.json.

    Args:
        target: as in `check_conversion`.

    Raises:
        CheckpointError: the source has settings that the target's config.json cannot express.
    """
    if target in FACTORED:
        return source.checkpoint.config
    if target == ROTATED:
        # A tied head cannot contain the final norm's weight.
        return source.checkpoint.config | {"tie_word_embeddings": False}
    return _diffllama_config(source) if target == "diffllama" else _diff_v2_config(source)


def find_origin(
    target: str, source: Source, adapter: Adapter, name: str, factors: Mapping[str, Tensor] | None = None
) -> Origin:
    """Return how a tensor of the converted checkpoint is computed: from which source tensor, row order and change.

    Args:
        target: as in `check_conversion`.
        adapter: adapter of the converted checkpoint.
        name: name of the tensor in the converted checkpoint.
        factors: for smoothed or scaled inputs, the factors [channels] by the norm or projection that they divide.
    """
    if target in FACTORED:
        return _scaled_origin(name, factors or {})
    if target == ROTATED:
        return _rotated_origin(source, name)
    return _diffllama_origin(source, adapter, name) if target == "diffllama" else _diff_v2_origin(source, name)


def describe_change(target: str, source: Source, factors: int = 0) -> str:
    """Return sentences for the model card about what a conversion changes.

    Args:
        target: as in `check_conversion`.
        factors: number of inputs of linear layers that are smoothed or scaled.
    """
    if target in FACTORED:
        return (
            f"for {FACTORED[target]}, {factors} of {3 * source.architecture.num_hidden_layers} inputs of linear layers "
            f"are {target}: each channel is divided by a power of two, and the weights' columns are multiplied by it."
        )
    if target != ROTATED:
        return _CHANGES[target]
    width, spec = source.architecture.hidden_size, source.spec
    values = f"values are rotated within each head (seed {spec.value_dim})."
    if spec.output_gate:
        values = "values are not rotated, since their output gate is elementwise."
    return (
        f"the residual stream is rotated by an orthogonal matrix (of seed {width}, its width) and norms' weights are "
        f"folded into the weights that follow; {values}"
    )


# Settings that are always written, since their defaults differ between source and target.
_RESOLVED = (
    "rms_norm_eps", "hidden_act", "max_position_embeddings", "initializer_range", "tie_word_embeddings",
    "attention_bias", "rope_parameters",
)  # fmt: skip
# Settings that the resolved rope_parameters contains.
_ROTARY = ("rope_theta", "rope_scaling", "rope_angles", "partial_rotary_factor", "original_max_position_embeddings")


def _diffllama_config(source: Source) -> dict[str, Any]:
    ours, spec = source.require_transformer("convert"), source.spec
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
    return source_name, source.adapter.layout_row_order(target.architecture.diff_spec.layout, name), None


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


# The norm before each projection that reads the residual stream, and below the projections that write it.
NORM_BEFORE = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "lambda_proj", "output_gate_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}
_WRITERS = ("o_proj", "out_proj", "down_proj")


def _rotated_origin(source: Source, name: str) -> Origin:
    """Find the origin under a rotation x·Q of the residual stream (R1) and v·R of the values of each head (R2).

    An RMSNorm without a weight commutes with a rotation of all of its channels; so do λ and the gate of a head, but an
    elementwise gate does not commute with R.

    Sources: QuaRot, arXiv 2404.00456, section 4; SpinQuant, arXiv 2405.16406, section 3.
    """
    spec, stream = source.spec, make_rotation_matrix(source.architecture.hidden_size)
    place, _, kind = name.rpartition(".")
    parent, _, part = place.rpartition(".")
    if part in ("norm", "subln", *NORM_BEFORE.values()):
        return name, None, torch.ones_like
    if part == "embed_tokens":
        return name, None, lambda rows: rows.double() @ stream
    if part == "lm_head":
        is_tied, norm = source.architecture.tie_word_embeddings, _read_norm(source, "model.norm")
        return "model.embed_tokens.weight" if is_tied else name, None, lambda rows: _scale(norm)(rows) @ stream
    shape = source.checkpoint.tensors[name].shape
    if part in _WRITERS:
        has_heads = part != "down_proj" and kind == "weight" and not spec.output_gate
        return name, stream.T, _rotate_heads(source, parent) if has_heads else None
    values = None
    if part == "v_proj" and not spec.output_gate:
        # The checkpoint may have fewer heads than the model, which repeats them.
        values = _rotate_values(replace(spec.layout, kv_pairs=shape[0] // spec.value_dim))
    if len(shape) < 2:
        return name, values, None
    norm = _read_norm(source, f"{parent.rpartition('.')[0]}.{NORM_BEFORE[part]}")
    return name, values, lambda rows: _scale(norm)(rows) @ stream


def _scaled_origin(name: str, factors: Mapping[str, Tensor]) -> Origin:
    """Find the origin if factors divide rows of a norm or of `up_proj`, and multiply the columns of what reads them."""
    place, _, kind = name.rpartition(".")
    parent, _, part = place.rpartition(".")
    before = f"{parent}.up_proj" if part == "down_proj" else f"{parent.rpartition('.')[0]}.{NORM_BEFORE.get(part)}"
    rows, columns = factors.get(place), factors.get(before) if kind == "weight" else None
    return name, None if rows is None else 1 / rows, None if columns is None else _scale(columns)


@lru_cache
def _rotate_values(layout: HeadLayout) -> Tensor:
    """Return the matrix that rotates the rows of a value projection within each head."""
    rows = layout.channel_rows("v_proj")
    matrix = torch.zeros(rows.numel(), rows.numel(), dtype=torch.float64)
    matrix[rows[:, :, None], rows[:, None, :]] = make_rotation_matrix(layout.value_dim).T
    return matrix


def _rotate_heads(source: Source, attention: str) -> Change:
    """Return the function that folds a pair norm's weight into an output projection and rotates each head's columns."""
    spec, matrix = source.spec, make_rotation_matrix(source.spec.value_dim)
    if spec.post_norm == "affine":
        matrix = _read_norm(source, f"{attention}.subln")[:, None] * matrix
    return lambda rows: (rows.double().unflatten(1, (spec.pairs, spec.value_dim)) @ matrix).flatten(1)


def _read_norm(source: Source, norm: str) -> Tensor:
    """Read a norm's weight as float64.

    Raises:
        NonFiniteError: a value is not finite.
    """
    weight = source.checkpoint.read(f"{norm}.weight")
    check_rows_finite(weight, f"{norm}.weight", 0)
    return weight.double()


def _scale(factor: Tensor) -> Change:
    """Return a function that multiplies rows by a factor, or by one factor per column."""
    return lambda rows: rows.double() * factor.double()


_CHANGES = {
    "diffllama": "heads are reordered, the per-pair norm's weight is folded into o_proj.",
    "diff-v2": "every query head appears twice, so that a pair's two maps start equal, λ is ½ everywhere and o_proj is "
    "doubled. It is a starting point for training, not a trained DIFF model.",
}
