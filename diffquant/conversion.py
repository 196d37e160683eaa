"""Conversion of a checkpoint into another member of the family that computes the same function.

Two ways are exact: unilm's DIFF V1 as Hugging Face `diffllama`, and a plain Llama as DIFF V2.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.formats.atomic_folder import check_output, staged
from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import Block, Job, Shard, check_rows, checkpoint_stamp, write_shards
from diffquant.formats.writer import OutputTensor
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.shapes import Shape
from diffquant.quantization.card import converted_card
from diffquant.report.tables import megabytes
from diffquant.source.source import Source, open_source
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions

# A source tensor's rows [rows, ...] -> the target's.
Change = Callable[[Tensor], Tensor]

_WAYS = {"diffllama": "diff_v1", "diff-v2": "llama"}


@dataclass(frozen=True)
class Conversion:
    """What a run of `convert` did.

    Attributes:
        destination: folder that was written.
        source_type, target_type: model_type before and after.
        nbytes: bytes of all tensors written.
        seconds: seconds that the run took.
    """

    destination: Path
    source_type: str
    target_type: str
    nbytes: int
    seconds: float

    def summary(self) -> str:
        return (
            f"{self.destination}: {self.source_type} -> {self.target_type}, the same function, "
            f"{megabytes(self.nbytes)} in {self.seconds:.1f} s"
        )


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


def convert(
    source: Path | str | Source,
    destination: Path | str,
    to: str,
    *,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Write a checkpoint as another member of the family, the same function of its input.

    Args:
        source: a folder with model_type diff_v1 for "diffllama"; a Llama, folder or .gguf file, for "diff-v2".
        destination: the folder to make; it appears whole or not at all.
        to: "diffllama" or "diff-v2".
        overwrite: replace an existing checkpoint there, at the end.
        progress: called with output bytes.

    Raises:
        DiffQuantError: anything wrong with the source or the destination, or no exact way leads there.
    """
    started = time.monotonic()
    destination = Path(destination)
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    opened = open_source(source)
    checkpoint, source_type = opened.checkpoint, opened.model_type
    config = _target_config(checkpoint, opened.adapter, to)
    if opened.packed:
        raise CheckpointError(f"{opened.path} is quantized; convert its 16-bit original, then quantize the result")
    target = adapter_for(config)
    origins = _origins(checkpoint, opened.adapter, target, to)
    shards = _shards(checkpoint, target, origins)
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    key = {"verb": "convert", "to": to, "source": checkpoint_stamp(checkpoint), "versions": versions()}
    with staged(destination, key, total, overwrite) as staging:
        checkpoint.write_side_files(staging.folder)
        write_shards(shards, staging, total, progress)
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")
        card = converted_card(checkpoint.name, source_type, config["model_type"], _CARDS[to])
        write_atomically(staging.folder / "README.md", card)
    return Conversion(destination, source_type, config["model_type"], total, time.monotonic() - started)


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


def _target_config(checkpoint: Checkpoint, adapter: Adapter, to: str) -> dict[str, Any]:
    """The target's config.json.

    Raises:
        UsageError: no exact way leads from this source to `to`.
    """
    if to not in _WAYS:
        raise UsageError(f"cannot convert to {to!r}; possible are {', '.join(_WAYS)}")
    model_type = checkpoint.config["model_type"]
    if model_type != _WAYS[to]:
        ways = ", ".join(f"{start} to {end}" for end, start in _WAYS.items())
        raise UsageError(f"cannot convert {model_type} to {to} exactly; possible are {ways}")
    return _diffllama_config(checkpoint, adapter) if to == "diffllama" else _diff_v2_config(checkpoint, adapter)


def _diffllama_config(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Any]:
    ours, spec = adapter.architecture, adapter.architecture.diff_spec
    problems = []
    if not math.isclose(ours.rms_norm_eps, spec.post_norm_eps, rel_tol=1e-6):
        problems.append(
            f"rms_norm_eps is {ours.rms_norm_eps}, while subln's is {spec.post_norm_eps} and diffllama has one for both"
        )
    if ours.mlp_bias:
        problems.append("mlp_bias is true, and diffllama's MLP has none")
    if problems:
        raise CheckpointError(f"no diffllama computes what {checkpoint.path} does: {'; '.join(problems)}")
    dropped = ("rope_style", "gqa_pairing", "attention_dropout", "auto_map", "rope_theta", "rope_scaling")
    return _carried(checkpoint, adapter, dropped) | {
        "model_type": "diffllama",
        "architectures": ["DiffLlamaForCausalLM"],
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_dim,
    }


def _diff_v2_config(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Any]:
    spec = adapter.architecture.diff_spec
    return _carried(checkpoint, adapter, ("architectures", "auto_map", "rope_theta", "rope_scaling")) | {
        "model_type": "diff_v2",
        "num_attention_heads": 2 * spec.pairs,
        "num_key_value_heads": spec.kv_pairs,
        "head_dim": spec.head_dim,
        "rope_style": "half",
    }


def _carried(checkpoint: Checkpoint, adapter: Adapter, dropped: tuple[str, ...]) -> dict[str, Any]:
    """The source's config without what does not apply, what it left to defaults spelled out."""
    carried = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    return carried | {key: getattr(adapter.architecture, key) for key in _RESOLVED}


def _origins(checkpoint: Checkpoint, adapter: Adapter, target: Adapter, to: str) -> dict[str, Origin]:
    """Origin of each tensor of the target."""
    if to == "diffllama":
        return {name: _diffllama_origin(checkpoint, adapter, target, name) for name in target.source_shapes()}
    return {name: _diff_v2_origin(adapter, name) for name in target.source_shapes()}


def _diffllama_origin(checkpoint: Checkpoint, adapter: Adapter, target: Adapter, name: str) -> Origin:
    """Origin under a change of layout: heads from adjacent to halves, rotated rows from interleaved to half.

    The norm subln, which diffllama has without a weight, goes into o_proj's columns.
    """
    spec, source = adapter.architecture.diff_spec, adapter.source_name(name)
    if name.endswith("o_proj.weight"):
        subln = checkpoint.read(name.replace("o_proj", "subln"))
        return Origin(source, change=_scaled(source, subln.repeat(spec.pairs)))
    return Origin(source, adapter.rows_as(target.architecture.diff_spec.layout, name))


def _diff_v2_origin(adapter: Adapter, name: str) -> Origin:
    """Origin where both maps are the Llama's one: each query head stands twice; λ is ½, so the output is doubled."""
    spec, projection = adapter.architecture.diff_spec, name.split(".")[-2]
    if projection == "lambda_proj":
        return Origin(None)
    if projection == "q_proj":
        heads = torch.arange(spec.pairs * spec.head_dim).view(spec.pairs, spec.head_dim)
        return Origin(name, heads.repeat_interleave(2, dim=0).flatten())
    if name.endswith("o_proj.weight"):
        return Origin(name, change=_scaled(name, torch.tensor(2.0)))
    return Origin(name)


def _scaled(name: str, factor: Tensor) -> Change:
    """Multiplication by a factor (of each column, or one), which refuses what the dtype cannot hold."""

    def change(rows: Tensor) -> Tensor:
        scaled = (rows.double() * factor.double()).to(rows.dtype)
        if not torch.isfinite(scaled).all():
            raise CheckpointError(
                f"{name} holds values that overflow {rows.dtype} once multiplied by {factor.abs().max().item():g}; "
                "convert the checkpoint to bfloat16 or float32 first"
            )
        return scaled

    return change


def _shards(checkpoint: Checkpoint, target: Adapter, origins: dict[str, Origin]) -> list[Shard]:
    """Output files, divided as the source's are; a tensor with no source goes with the one before it."""
    jobs: dict[str, list[Job]] = {file.name: [] for file in checkpoint.weight_files()}
    shard = next(iter(jobs))
    for name, shape in target.source_shapes().items():
        origin = origins[name]
        if origin.source is not None:
            shard = checkpoint.tensors[origin.source].shard
        jobs[shard].append(_job(checkpoint, name, shape, origin))
    return [Shard(file, tuple(jobs[file.name])) for file in checkpoint.weight_files() if jobs[file.name]]


def _job(checkpoint: Checkpoint, name: str, shape: Shape, origin: Origin) -> Job:
    dtype = checkpoint.tensors[origin.source or "model.embed_tokens.weight"].dtype

    def make(first: int, last: int) -> Block:
        if origin.source is None:
            return Block({name: (first, torch.zeros(last - first, *shape[1:], dtype=dtype))})
        wanted = slice(first, last) if origin.rows is None else origin.rows[first:last]
        rows = checkpoint.read_rows(origin.source, wanted)
        check_rows(rows, origin.source, first)
        return Block({name: (first, rows if origin.change is None else origin.change(rows))})

    return Job(name, shape[0], torch.Size(shape[1:]).numel(), (OutputTensor(name, dtype, shape),), make)


_CARDS = {
    "diffllama": "The function is unchanged: heads are reordered, the per-pair norm's weight is folded into o_proj.",
    "diff-v2": (
        "The function is unchanged: every query head stands twice, so that a pair's two maps start equal, λ is ½ "
        "everywhere and o_proj is doubled. It is a starting point for training, not a trained DIFF model."
    ),
}
