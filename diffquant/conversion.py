"""Conversion of a checkpoint into another member of the family that computes the same function.

Three ways are exact: unilm's DIFF V1 as Hugging Face `diffllama`, a plain Llama as DIFF V2, and DEX as a plain Llama.
What is written in a narrower dtype than it is read in, as of a GGUF file, is the same function but for that rounding,
which is measured.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError, UsageError
from diffquant.formats.atomic_folder import check_output, staged
from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import Block, Job, Shard, check_rows, checkpoint_stamp, in_dtype, write_shards
from diffquant.formats.writer import OutputTensor
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.blocks import Shape
from diffquant.quantization.card import converted_card
from diffquant.recipe import Recipe
from diffquant.report.tables import megabytes
from diffquant.serve.folder import config_for_engines, write_modelling_file
from diffquant.source.dex import DEX, DexCheckpoint
from diffquant.source.source import Source, open_source
from diffquant.support.devices import as_dtype
from diffquant.support.escaping import one_line
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, progress_for
from diffquant.support.readable import Readable
from diffquant.support.versions import versions

# A source tensor's rows [rows, ...] -> the target's.
Change = Callable[[Tensor], Tensor]

# Float32's own rounding, which a folded norm brings, is not worth a word.
_FLOAT32_ERROR = 1e-6
_WAYS = {"diffllama": "diff_v1", "diff-v2": "llama", "llama": DEX}


@dataclass(frozen=True, repr=False)
class Conversion(Readable):
    """The outcome of `convert`.

    Attributes:
        destination: folder that was written.
        source_type, target_type: model_type before and after.
        bytes_before: bytes that the source takes.
        bytes_after: bytes of all tensors written.
        dtype: dtype of the matrices written.
        rounding_error: relative RMS error of what was rounded to that dtype; 0 where nothing changed.
        recipe: recipe of cache and logits that the source records, and the destination with it; 16 bits without one.
        seconds: seconds that the run took.
    """

    destination: Path
    source_type: str
    target_type: str
    bytes_before: int
    bytes_after: int
    dtype: torch.dtype
    rounding_error: float
    recipe: Recipe
    seconds: float

    def summary(self) -> str:
        recipe = "" if self.recipe == Recipe() else f"\nthe source's recipe goes along: {self.recipe!r}"
        return (
            f"{one_line(str(self.destination))}: {self.source_type} -> {self.target_type}, the same function"
            f"{_rounding_note(self.dtype, self.rounding_error)}\n"
            f"{megabytes(self.bytes_after)} from the source's {megabytes(self.bytes_before)}, in {self.seconds:.1f} s"
            f"{recipe}"
        )


def _rounding_note(dtype: torch.dtype, error: float) -> str:
    """A remark to put after "the same function" when weights were rounded."""
    name = str(dtype).removeprefix("torch.")
    return f" but for weights rounded to {name} (relative RMS error {error:.2%})" if error > _FLOAT32_ERROR else ""


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
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint as another member of the family, the same function of its input.

    Args:
        source: a folder with model_type diff_v1 for "diffllama"; a Llama, folder or .gguf file, for "diff-v2"; a folder
            with model_type dex_llama for "llama".
        destination: the folder to make; it appears whole or not at all.
        to: "diffllama", "diff-v2" or "llama".
        dtype: dtype of the matrices; the source's by default, for a GGUF file with codes bfloat16. Vectors (norms,
            biases, λ) keep theirs.
        overwrite: replace an existing checkpoint there, at the end.
        progress: function called with output bytes; by default a line on a terminal, one per minute in a log.

    Raises:
        DiffQuantError: anything wrong with the source or the destination, or no exact way leads there.
    """
    started = time.monotonic()
    destination, progress, dtype = Path(destination), progress or progress_for("convert"), as_dtype(dtype)
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    opened = open_source(source)
    checkpoint, source_type = opened.checkpoint, _type_of(opened)
    config = _target_config(opened, to)
    if opened.packed:
        raise CheckpointError(f"{opened.path} is quantized; convert its 16-bit original, then quantize the result")
    target = adapter_for(config)
    origins = _origins(checkpoint, opened.adapter, target, to)
    written = dtype or checkpoint.written_dtype("model.embed_tokens.weight")
    dtype_name = str(written).removeprefix("torch.")
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype_name}
    if opened.recipe != Recipe():
        config["diffquant_config"] = opened.recipe.to_config()
    if checkpoint.rounded_as:
        # A verb that rounds these weights again can say so.
        config["diffquant_config"] = config.get("diffquant_config", {}) | {"rounded_as": checkpoint.rounded_as}
    shards = _shards(checkpoint, target, origins, dtype)
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    key = {
        "verb": "convert",
        "to": to,
        "dtype": dtype_name,
        "source": checkpoint_stamp(checkpoint),
        "versions": versions(),
    }
    with staged(destination, key, total, overwrite) as staging:
        checkpoint.write_side_files(staging.folder)
        records = write_shards(shards, staging, total, progress)
        error = _rounding_error(records)
        config = config_for_engines(config, target)
        write_modelling_file(staging.folder, config, target)
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")
        what = f"The function is unchanged{_rounding_note(written, error)}: {_CARDS[to]}"
        if opened.recipe != Recipe():
            write_atomically(staging.folder / "recipe.yaml", opened.recipe.to_yaml())
            what += f" Its recipe goes along: `{opened.recipe!r}`."
        card = converted_card(checkpoint, source_type, config["model_type"], what)
        write_atomically(staging.folder / "README.md", card)
    return Conversion(
        destination,
        source_type,
        config["model_type"],
        checkpoint.stored_nbytes,
        total,
        written,
        error,
        opened.recipe,
        time.monotonic() - started,
    )


def _type_of(source: Source) -> str:
    """The model_type of config.json, which for DEX is not that of the Llama it is opened as."""
    return DEX if isinstance(source.checkpoint, DexCheckpoint) else source.model_type


def _rounding_error(records: Mapping[str, Mapping[str, Any]]) -> float:
    """Relative RMS error of everything that was rounded, of the records of the files written."""
    sums = [squares for record in records.values() for squares in record["sums"].values()]
    total = math.fsum(values for _, values in sums)
    return math.sqrt(math.fsum(error for error, _ in sums) / total) if total else 0.0


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


def _target_config(source: Source, to: str) -> dict[str, Any]:
    """The target's config.json.

    Raises:
        UsageError: no exact way leads from this source to `to`.
    """
    if to not in _WAYS:
        raise UsageError(f"cannot convert to {to!r}; choose from {', '.join(_WAYS)}")
    checkpoint, adapter, model_type = source.checkpoint, source.adapter, _type_of(source)
    if model_type != _WAYS[to]:
        ways = ", ".join(f"{start} to {end}" for end, start in _WAYS.items())
        kind = ", a plain Transformer," if source.spec.maps == 1 else ""
        raise UsageError(f"cannot convert {model_type}{kind} to {to} exactly; choose from {ways}")
    if to == "llama":
        return checkpoint.written_config
    return _diffllama_config(source) if to == "diffllama" else _diff_v2_config(checkpoint, adapter)


def _diffllama_config(source: Source) -> dict[str, Any]:
    checkpoint, adapter, ours, spec = source.checkpoint, source.adapter, source.transformer("convert"), source.spec
    problems = []
    if not math.isclose(ours.rms_norm_eps, spec.post_norm_eps, rel_tol=1e-6):
        problems.append(
            f"rms_norm_eps is {ours.rms_norm_eps}, while subln's is {spec.post_norm_eps} and diffllama has one for both"
        )
    if ours.mlp_bias:
        problems.append("mlp_bias is true, and diffllama's MLP has none")
    if problems:
        raise CheckpointError(f"no diffllama computes what {checkpoint.path} does: {'; '.join(problems)}")
    dropped = ("rope_style", "gqa_pairing", "attention_dropout", "auto_map", *_ROTARY)
    return _carried(checkpoint, adapter, dropped) | {
        "model_type": "diffllama",
        "architectures": ["DiffLlamaForCausalLM"],
        "num_attention_heads": spec.query_heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_dim,
    }


def _diff_v2_config(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Any]:
    spec = adapter.architecture.diff_spec
    return _carried(checkpoint, adapter, ("architectures", "auto_map", *_ROTARY)) | {
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
    if to == "llama":
        return {name: Origin(name) for name in target.source_shapes()}
    return {name: _diff_v2_origin(adapter, name) for name in target.source_shapes()}


def _diffllama_origin(checkpoint: Checkpoint, adapter: Adapter, target: Adapter, name: str) -> Origin:
    """Origin under a change of layout: heads from adjacent to halves, rotated rows from interleaved to half.

    The norm subln, which diffllama has without a weight, goes into o_proj's columns.
    """
    spec, source = adapter.architecture.diff_spec, adapter.source_name(name)
    if name.endswith("o_proj.weight") and spec.post_norm == "affine":
        subln = checkpoint.read(name.replace("o_proj", "subln"))
        return Origin(source, change=_scaled(subln.repeat(spec.pairs)))
    return Origin(source, adapter.rows_as(target.architecture.diff_spec.layout, name))


def _diff_v2_origin(adapter: Adapter, name: str) -> Origin:
    """Origin where both maps are the Llama's one: each query head appears twice; λ is ½, so the output is doubled."""
    spec, projection = adapter.architecture.diff_spec, name.split(".")[-2]
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


def _shards(
    checkpoint: Checkpoint, target: Adapter, origins: dict[str, Origin], matrix_dtype: torch.dtype | None
) -> list[Shard]:
    """Output files, divided as the source's are; a tensor with no source goes with the one before it."""
    jobs: dict[str, list[Job]] = {file.name: [] for file in checkpoint.weight_files()}
    shard = next(iter(jobs))
    for name, shape in target.source_shapes().items():
        origin = origins[name]
        if origin.source is not None:
            shard = checkpoint.tensors[origin.source].shard
        dtype = checkpoint.written_dtype(origin.source or "model.embed_tokens.weight")
        if len(shape) == 2:
            dtype = matrix_dtype or dtype
        jobs[shard].append(_job(checkpoint, name, shape, origin, dtype))
    return [Shard(None, tuple(jobs[file.name])) for file in checkpoint.weight_files() if jobs[file.name]]


def _job(checkpoint: Checkpoint, name: str, shape: Shape, origin: Origin, dtype: torch.dtype) -> Job:
    """The job that makes a tensor of the target, and measures what its dtype rounds."""

    def make(first: int, last: int) -> Block:
        if origin.source is None:
            return Block({name: (first, torch.zeros(last - first, *shape[1:], dtype=dtype))})
        wanted = slice(first, last) if origin.rows is None else origin.rows[first:last]
        rows = checkpoint.read_rows(origin.source, wanted)
        check_rows(rows, origin.source, first)
        values = rows if origin.change is None else origin.change(rows)
        converted = in_dtype(values, dtype, name)
        if converted.dtype == values.dtype:
            return Block({name: (first, converted)})
        error = float((converted.to(values.dtype) - values).square().sum())
        return Block({name: (first, converted)}, error, float(values.square().sum()))

    return Job(name, shape[0], torch.Size(shape[1:]).numel(), (OutputTensor(name, dtype, shape),), make)


_CARDS = {
    "llama": "what DEX subtracts from each selected head is folded into o_proj.",
    "diffllama": "heads are reordered, the per-pair norm's weight is folded into o_proj.",
    "diff-v2": (
        "every query head appears twice, so that a pair's two maps start equal, λ is ½ "
        "everywhere and o_proj is doubled. It is a starting point for training, not a trained DIFF model."
    ),
}
