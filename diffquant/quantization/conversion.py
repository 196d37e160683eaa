"""Converts a checkpoint to another architecture, or changes its weights, without changing its function.

`checkpoints/conversions.py` defines the conversions. If weights are written in a narrower dtype than they are read in,
as from a GGUF file, the function is the same except for that rounding error, which is measured.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.atomic_folder import RECORD, check_output, stage_output
from diffquant.checkpoints.conversions import (
    FACTORED,
    ROTATED,
    SAME_TYPE,
    Origin,
    check_conversion,
    convert_config,
    describe_change,
    find_origin,
)
from diffquant.checkpoints.corpora import Sources
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.row_stream import (
    ConversionJob,
    RowBlock,
    Shard,
    check_rows_finite,
    checkpoint_key,
    convert_rows,
    row_blocks,
    write_shards,
)
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.writer import OutputTensor
from diffquant.errors import CheckpointError, UsageError
from diffquant.family.call import dtype_name
from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.blocks import Shape
from diffquant.quantization.descriptions import converted_card
from diffquant.quantization.engine_folder import config_for_engines, remove_code_files, write_modelling_file
from diffquant.quantization.foreign_code import describe_removed_code, remove_code_entries
from diffquant.recipe import Recipe
from diffquant.reports.tables import format_size
from diffquant.support.devices import as_dtype
from diffquant.support.files import write_atomically
from diffquant.support.installation import versions
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.support.terminal import PrintableResult, one_line

# Smaller errors are float32 rounding, as from folding a norm into a weight, and are not reported.
_FLOAT32_ERROR = 1e-6
# Rows of a mixed tensor that are made at once, since each block of them reads the whole source.
_MIXED_ROWS = 256


@dataclass(frozen=True, repr=False)
class ConversionResult(PrintableResult):
    """The outcome of `convert`.

    Attributes:
        destination: folder that was written.
        source_type, target_type: model_type before and after.
        bytes_before: size of the source in bytes.
        bytes_after: bytes of all tensors written.
        dtype: dtype of the matrices written.
        rounding_error: relative RMS error of the weights rounded to that dtype; 0 if no weight was rounded.
        recipe: schemes of cache and logits that the source records and the destination keeps; 16 bits if it has none.
        seconds: wall time in seconds.
        notes: messages about what was rotated, and about code of the source that was left out.
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
        recipe = "" if self.recipe == Recipe() else f"\nthe source's recipe is kept: {self.recipe!r}"
        text = (
            f"{one_line(str(self.destination))}: {self.source_type} -> {self.target_type}, the same function"
            f"{_rounding_note(self.dtype, self.rounding_error)}\n"
            f"{format_size(self.bytes_after)} from the source's {format_size(self.bytes_before)}, in "
            f"{self.seconds:.1f} s{recipe}"
        )
        return "\n".join([text, *self.notes])


def _rounding_note(dtype: torch.dtype, error: float) -> str:
    """Return text to append to "the same function" if weights were rounded, else ""."""
    name = dtype_name(dtype)
    return f" except for weights rounded to {name} (relative RMS error {error:.2%})" if error > _FLOAT32_ERROR else ""


def convert(
    source: Path | str | Source,
    destination: Path | str,
    to: str,
    *,
    dtype: torch.dtype | str | None = None,
    text: Sources = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Convert a checkpoint to another architecture, or change its weights, without changing its function.

    Args:
        source: a folder with model_type diff_v1 for "diffllama"; a Llama's folder or .gguf file for "diff-v2"; any
            model that `DiffTransformer` runs for "rotated", "smoothed" and "scaled".
        destination: the folder to create; it is written atomically.
        to: "diffllama", "diff-v2", "rotated", "smoothed" or "scaled".
        dtype: dtype of the matrices. The default for "rotated" is float32, so that `quantize` rounds only once; for
            other conversions it is the source's, or bfloat16 for a quantized GGUF file. Vectors (norms, λ, biases that
            are not rotated) keep their dtype.
        text: calibration data for "smoothed" and "scaled", as `read_calibration` takes it; the bundled text by default.
        overwrite: replace an existing checkpoint there, after the new one is complete.
        progress: function called with the number of layers whose factors are found, if any, then with the number of
            output bytes. By default, progress is a line on a terminal, or a line per minute in a log.

    Raises:
        DiffQuantError: the source or the destination is invalid, or there is no exact conversion.
    """
    started = time.monotonic()
    destination, progress = Path(destination), progress or progress_for("convert")
    dtype = as_dtype(dtype) or (torch.float32 if to == ROTATED else None)
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    opened = open_source(source)
    opened.check_special_tokens()
    check_conversion(to, opened)
    checkpoint, source_type = opened.checkpoint, opened.model_type
    if text is not None and to not in FACTORED:
        read_for = " and ".join(option_name("to", each) for each in FACTORED)
        raise UsageError(f"{option_name('text')} is read only for {read_for}; leave it out")
    config = convert_config(to, opened)
    # Scales of the cache may differ in the result.
    if opened.packed or opened.has_only_cache_scales:
        raise CheckpointError(f"{opened.path} is quantized; convert its 16-bit original, then quantize the result")
    target = adapter_for(config)
    factors: dict[str, Tensor] = {}
    read: dict[str, Any] = {}
    if to in FACTORED:
        # Imported here, since it runs a model, which other conversions do without.
        from diffquant.quantization.smoothing import find_factors

        factors, read = find_factors(opened, to, text, progress)
    origins = {name: find_origin(to, opened, target, name, factors) for name in target.source_shapes()}
    written = dtype or checkpoint.output_dtype("model.embed_tokens.weight")
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype_name(written)}
    # Lets a command that rounds these weights warn about it, and `fidelity` name every text that shaped them.
    this = f"{to} on {read['tokens']:,} tokens of a text with digest {read['text']}" if read else None
    scaled_on = ", then ".join(filter(None, (checkpoint.scaled_on, this)))
    history = {"rounded_as": checkpoint.earlier_format, "scaled_on": scaled_on}
    recorded = opened.recipe.to_config() if opened.recipe != Recipe() else {}
    recorded |= {key: text for key, text in history.items() if text}
    config |= {"diffquant_config": recorded} if recorded else {}
    shards = _shards(checkpoint, target, origins, dtype)
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    key = {
        "verb": "convert",
        "to": to,
        "dtype": str(dtype),
        "source": checkpoint_key(checkpoint),
        **({"read": read} if read else {}),
        "versions": versions(),
    }
    with stage_output(destination, key, total, overwrite) as staging:
        checkpoint.write_side_files(staging.folder)
        records = write_shards(shards, staging, total, progress)
        error = _rounding_error(records)
        config, left_out = remove_code_entries(staging.folder, config)
        left_out += remove_code_files(staging.folder)
        config = config_for_engines(config, target)
        if code := write_modelling_file(staging.folder, config, target):
            write_atomically(staging.folder / RECORD, json.dumps({"code": code}))
        write_atomically(staging.folder / "config.json", json.dumps(config, indent=2) + "\n")
        change = describe_change(to, opened, len(factors))
        what = f"The function is unchanged{_rounding_note(written, error)}: {change}"
        if opened.recipe != Recipe():
            write_atomically(staging.folder / "recipe.yaml", opened.recipe.to_yaml())
            what += f" Its recipe is kept: `{opened.recipe!r}`."
        kind = to if to in SAME_TYPE else f"as {config['model_type']}"
        card = converted_card(checkpoint, source_type, kind, what, target.architecture.diff_spec.maps > 1, left_out)
        write_atomically(staging.folder / "README.md", card)
        notes = (*((change,) if to in SAME_TYPE else ()), *describe_removed_code(left_out, staging.folder))
    return ConversionResult(
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
    """Return the relative RMS error over all rounded weights, from the records of the files written."""
    sums = [squares for record in records.values() for squares in record["sums"].values()]
    total = math.fsum(values for _, values in sums)
    return math.sqrt(math.fsum(error for error, _ in sums) / total) if total else 0.0


def _shards(
    checkpoint: Checkpoint, target: Adapter, origins: dict[str, Origin], matrix_dtype: torch.dtype | None
) -> list[Shard]:
    """Return the output files, sharded like the source; a tensor without a source is in the shard of the previous one.

    Args:
        matrix_dtype: dtype of the matrices written, or None to keep the source's.
    """
    jobs: dict[str, list[ConversionJob]] = {file.name: [] for file in checkpoint.weight_files()}
    shard = next(iter(jobs))
    for name, shape in target.source_shapes().items():
        origin, source = origins[name], origins[name][0]
        if source is not None:
            shard = checkpoint.tensors[source].shard
        dtype = checkpoint.output_dtype(source or "model.embed_tokens.weight")
        if len(shape) == 2 or _mixes_rows(origin):
            dtype = matrix_dtype or dtype
        jobs[shard].append(_job(checkpoint, name, shape, origin, dtype))
    return [Shard(None, tuple(jobs[file.name])) for file in checkpoint.weight_files() if jobs[file.name]]


def _job(checkpoint: Checkpoint, name: str, shape: Shape, origin: Origin, dtype: torch.dtype) -> ConversionJob:
    """Return the job that computes a tensor of the target, and its rounding error in `dtype`."""

    def make(first: int, last: int) -> RowBlock:
        source, order, change = origin
        if source is None:
            return RowBlock({name: (first, torch.zeros(last - first, *shape[1:], dtype=dtype))})
        rows = _read_rows(checkpoint, source, order, first, last)
        values = rows if change is None else change(rows)
        converted = convert_rows(values, dtype, name)
        if converted.dtype == values.dtype:
            return RowBlock({name: (first, converted)})
        error = float((converted.to(values.dtype) - values).square().sum())
        return RowBlock({name: (first, converted)}, error, float(values.square().sum()))

    together = _MIXED_ROWS if _mixes_rows(origin) else 1
    return ConversionJob(
        name, shape[0], torch.Size(shape[1:]).numel(), (OutputTensor(name, dtype, shape),), make, together
    )


def _mixes_rows(origin: Origin) -> bool:
    """Return whether a tensor's rows are sums of source rows."""
    return origin[1] is not None and origin[1].dim() == 2


def _read_rows(checkpoint: Checkpoint, name: str, order: Tensor | None, first: int, last: int) -> Tensor:
    """Read what a tensor's rows are made of; `order` is as in an `Origin`.

    Raises:
        NonFiniteError: a value is not finite.
    """
    if order is None or order.dim() == 1:
        factor = order[first:last] if order is not None and order.is_floating_point() else None
        here = slice(first, last) if order is None or factor is not None else order[first:last]
        rows = checkpoint.read_rows(name, here)
        check_rows_finite(rows, name, first)
        return rows if factor is None else rows * factor.view(-1, *[1] * (rows.dim() - 1))
    height, *width = checkpoint.tensors[name].shape
    mixed = torch.zeros(last - first, *width, dtype=order.dtype)
    for begin, end in row_blocks(height, math.prod(width)):
        rows = checkpoint.read_rows(name, slice(begin, end))
        check_rows_finite(rows, name, begin)
        mixed += order[first:last, begin:end] @ rows.to(order.dtype)
    return mixed
