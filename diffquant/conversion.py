"""Conversion of a checkpoint into another member of the family that computes the same function.

`source/exact_ways.py` has the ways. What is written in a narrower dtype than it is read in, as of a GGUF file, is the
same function but for that rounding, which is measured.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffquant.errors import CheckpointError
from diffquant.formats.atomic_folder import RECORD, check_output, staged
from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import Block, Job, Shard, check_rows, checkpoint_stamp, in_dtype, write_shards
from diffquant.formats.writer import OutputTensor
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.blocks import Shape
from diffquant.quantization.card import converted_card
from diffquant.quantization.descriptions import note_left_out
from diffquant.recipe import Recipe
from diffquant.report.tables import megabytes
from diffquant.serve.folder import config_for_engines, remove_code_files, write_modelling_file
from diffquant.serve.foreign_code import leave_out_code
from diffquant.source.exact_ways import Origin, way_to
from diffquant.source.source import Source, open_source
from diffquant.support.devices import as_dtype
from diffquant.support.escaping import one_line
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, progress_for
from diffquant.support.readable import Readable
from diffquant.support.versions import versions

# Float32's own rounding, which a folded norm brings, is not worth a word.
_FLOAT32_ERROR = 1e-6


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
        notes: sentences for people, about code of the source's that was left out.
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
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        recipe = "" if self.recipe == Recipe() else f"\nthe source's recipe goes along: {self.recipe!r}"
        text = (
            f"{one_line(str(self.destination))}: {self.source_type} -> {self.target_type}, the same function"
            f"{_rounding_note(self.dtype, self.rounding_error)}\n"
            f"{megabytes(self.bytes_after)} from the source's {megabytes(self.bytes_before)}, in {self.seconds:.1f} s"
            f"{recipe}"
        )
        return "\n".join([text, *self.notes])


def _rounding_note(dtype: torch.dtype, error: float) -> str:
    """A remark to put after "the same function" when weights were rounded."""
    name = str(dtype).removeprefix("torch.")
    return f" but for weights rounded to {name} (relative RMS error {error:.2%})" if error > _FLOAT32_ERROR else ""


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
        source: a folder with model_type diff_v1 for "diffllama"; a Llama, folder or .gguf file, for "diff-v2".
        destination: the folder to make; it appears whole or not at all.
        to: "diffllama" or "diff-v2".
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
    opened.check_special_tokens()
    checkpoint, source_type, way = opened.checkpoint, opened.model_type, way_to(to, opened)
    config = way.config(opened)
    if opened.packed:
        raise CheckpointError(f"{opened.path} is quantized; convert its 16-bit original, then quantize the result")
    target = adapter_for(config)
    origins = {name: way.origin(opened, target, name) for name in target.source_shapes()}
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
        "dtype": str(dtype),
        "source": checkpoint_stamp(checkpoint),
        "versions": versions(),
    }
    with staged(destination, key, total, overwrite) as staging:
        checkpoint.write_side_files(staging.folder)
        records = write_shards(shards, staging, total, progress)
        error = _rounding_error(records)
        config, left_out = leave_out_code(staging.folder, config)
        left_out += remove_code_files(staging.folder)
        config = config_for_engines(config, target)
        if code := write_modelling_file(staging.folder, config, target):
            write_atomically(staging.folder / RECORD, json.dumps({"code": code}))
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")
        what = f"The function is unchanged{_rounding_note(written, error)}: {way.card}"
        if opened.recipe != Recipe():
            write_atomically(staging.folder / "recipe.yaml", opened.recipe.to_yaml())
            what += f" Its recipe goes along: `{opened.recipe!r}`."
        card = converted_card(checkpoint, source_type, config["model_type"], what, left_out)
        write_atomically(staging.folder / "README.md", card)
        notes = note_left_out(left_out, staging.folder)
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
        notes,
    )


def _rounding_error(records: Mapping[str, Mapping[str, Any]]) -> float:
    """Relative RMS error of everything that was rounded, of the records of the files written."""
    sums = [squares for record in records.values() for squares in record["sums"].values()]
    total = math.fsum(values for _, values in sums)
    return math.sqrt(math.fsum(error for error, _ in sums) / total) if total else 0.0


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
