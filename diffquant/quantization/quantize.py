"""Quantizes a checkpoint's weights block by block, so that only a few blocks are in memory at once."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.atomic_folder import check_output, stage_output
from diffquant.checkpoints.compressed_tensors import (
    INPUT_GLOBAL,
    SCALE,
    can_engines_use_cache,
    compute_scales,
    decode_codes,
    pack_rows,
)
from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.row_stream import (
    ConversionJob,
    RowBlock,
    Shard,
    check_rows_finite,
    checkpoint_key,
    make_copy_job,
    write_shards,
)
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.checkpoints.writer import OutputTensor
from diffquant.errors import UsageError
from diffquant.quantization.descriptions import write_descriptions
from diffquant.quantization.engine_folder import can_engines_run
from diffquant.quantization.plan import PlannedTensor, QuantizationPlan, plan_quantization
from diffquant.quantization.rounded_weight import RoundedWeight
from diffquant.quantization.roundings import Rounder, rounding_named
from diffquant.quantization.roundings.base import Magnitudes
from diffquant.quantization.stock_names import add_stock_names
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.scheme import Scheme
from diffquant.reports.tables import compare_size
from diffquant.support.devices import as_dtype
from diffquant.support.installation import versions
from diffquant.support.progress import Progress, progress_for
from diffquant.support.terminal import PrintableResult, one_line


@dataclass(frozen=True)
class TensorErrorRecord:
    """Relative RMS error of a packed weight: RMS of the error divided by RMS of the weight.

    Attributes:
        name: name of the weight in the checkpoint.
        scheme: scheme that the weight is packed under.
        error: relative RMS error as a fraction.
    """

    name: str
    scheme: Scheme
    error: float


@dataclass(frozen=True, repr=False)
class QuantizationResult(PrintableResult):
    """The outcome of `quantize`.

    Attributes:
        destination: folder that was written.
        bytes_before: size of the source in bytes.
        bytes_after: bytes of all tensors of the destination.
        weights: number of elements of all tensors.
        packed_bits: mean stored bits per packed weight, scales included; per weight if none is packed.
        seconds: wall time of this run in seconds.
        resumed: number of files reused from an interrupted run: shards, and layers rounded with calibration data.
        errors: error of every packed weight, largest first.
        rounding: name of the rounding.
        notes: messages about the recipe that the source records, and about code that was left out.
    """

    destination: Path
    bytes_before: int
    bytes_after: int
    weights: int
    packed_bits: float
    seconds: float
    resumed: int
    errors: tuple[TensorErrorRecord, ...]
    rounding: str
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return a summary of a few lines, with the three weights of largest error."""
        lines = [
            f"{one_line(str(self.destination))}: {compare_size(self.bytes_after, self.bytes_before, self.weights)}, "
            f"in {self.seconds:.1f} s"
            + (f", {self.resumed} files reused from an interrupted run" if self.resumed else "")
        ]
        if self.errors:
            mean = sum(e.error for e in self.errors) / len(self.errors)
            lines.append(
                f"{len(self.errors)} weights packed at {self.packed_bits:.2f} stored bits each by {self.rounding}, "
                f"relative RMS error {mean:.2%} on average; the largest:"
            )
            lines += [f"  {e.error:.2%}  {one_line(e.name)}  {e.scheme}" for e in self.errors[:3]]
        return "\n".join([*lines, *self.notes])


def quantize(
    source: Path | str | Source | WeightSource,
    destination: Path | str,
    recipe: RecipeLike,
    *,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    on_plan: Callable[[QuantizationPlan], None] | None = None,
    calibrate: Callable[..., Ranges] | None = None,
    progress: Progress | None = None,
) -> QuantizationResult:
    """Write a quantized copy of a checkpoint.

    Args:
        source: a folder of safetensors, a .gguf file, or either as an open `Source`; or a folder of any architecture as
            an open `WeightSource`, whose weights are selected by name.
        destination: the folder to create; it is written atomically.
        recipe: recipe for the weights, as `Recipe.parse` takes it. Its schemes of cache and logits are only recorded,
            in `diffquant_config`; those that the source records are kept unless this recipe sets them.
        dtype: dtype in which unpacked matrices are stored; by default the checkpoint's, or bfloat16 if that is float32.
            It does not change the dtype that the model runs in.
        overwrite: replace an existing checkpoint there, after the new one is complete.
        on_plan: function called with the plan before anything is written; an exception in it ends the run.
        calibrate: function that calibrates ranges of keys and values, from which cache scales are stored if inference
            engines support the recipe's cache. Without it, only diffquant quantizes the cache.
        progress: function called with the number of layers done, if the rounding reads calibration data, then with the
            number of output bytes. By default, progress is a line on a terminal, or a line per minute in a log.

    Raises:
        DiffQuantError: the source, the recipe or the destination is invalid; no partial output is left.
        KeyboardInterrupt: finished files are kept, and the message explains how to resume.
    """
    started = time.monotonic()
    destination, progress = Path(destination), progress or progress_for("quantize")
    recipe = Recipe.parse(recipe)
    path = source.path if isinstance(source, Source | WeightSource) else Path(source)
    check_output(path, destination, overwrite)
    opened = source if isinstance(source, WeightSource) else open_source(source)
    if isinstance(opened, Source):
        opened.check_special_tokens()
    plan = plan_quantization(opened, recipe, as_dtype(dtype))
    if plan.rules is not None:
        plan = add_stock_names(plan)
    if on_plan is not None:
        on_plan(plan)
    plan = _with_cache_scales(plan, opened, calibrate, progress)
    rounder = rounding_named(recipe.rounding.name).prepare(opened, plan.schemes, recipe.rounding, progress)
    rounded = {"name": recipe.rounding.name, **rounder.identity}
    key = {
        "verb": "quantize",
        "source": checkpoint_key(opened.checkpoint),
        "recipe": plan.recipe.to_dict(),
        "rounding": rounded,
        "rules": plan.rules.to_dict() if plan.rules else None,
        "dtype": str(as_dtype(dtype)),
        **({"cache scales": plan.cache_scales} if plan.cache_scales else {}),
        "versions": versions(),
    }
    # Finished layers keep a byte per code.
    kept_bytes = sum(tensor.elements for tensor in plan.packed) if rounder.make else 0
    with stage_output(destination, key, plan.bytes_after + kept_bytes, overwrite) as staging:
        opened.checkpoint.write_side_files(staging.folder)
        rounder = rounder.finish(staging)
        records = write_shards(_shards(plan, rounder), staging, plan.bytes_after, progress)
        errors = _errors(plan, records)
        left_out = write_descriptions(plan, opened, rounded, records, errors, staging.folder)
    by_error = sorted(plan.packed, key=lambda tensor: -errors[tensor.name])
    return QuantizationResult(
        destination,
        plan.bytes_before,
        plan.bytes_after,
        plan.weight_count,
        plan.packed_bits,
        time.monotonic() - started,
        staging.resumed,
        tuple(TensorErrorRecord(tensor.name, tensor.scheme, errors[tensor.name]) for tensor in by_error),
        recipe.rounding.name,
        (*plan.notes, *left_out),
    )


def _with_cache_scales(
    plan: QuantizationPlan, source: Source | WeightSource, calibrate: Callable[..., Ranges] | None, progress: Progress
) -> QuantizationPlan:
    """Return the plan with scales of the cache if engines can have it, or with a note if another one of e4m3 could."""
    if calibrate is None or not isinstance(source, Source):
        return plan
    if not can_engines_use_cache(plan.recipe) or not can_engines_run(source.adapter):
        asked = {scheme.format.name for target in ("k", "v") for scheme in plan.recipe.schemes_of(target)}
        return replace(plan, notes=(*plan.notes, _ONLY_HERE)) if "e4m3" in asked else plan
    try:
        ranges = calibrate(source, progress=progress)
    except UsageError as error:
        return replace(plan, notes=(*plan.notes, f"no scales of the cache are stored: {error}"))
    return replace(plan, cache_scales=compute_scales(source.adapter, ranges.tensors))


_ONLY_HERE = (
    "only diffquant applies this cache scheme: vLLM and transformers support only e4m3:static for both K and V, "
    "without residual, and only in models that they run"
)


def make_pack_job(
    checkpoint: Checkpoint, tensor: PlannedTensor, rounder: Rounder, magnitudes: Magnitudes | None = None
) -> ConversionJob:
    """Return the job that computes a weight's codes and scales, a block of rows at a time.

    Args:
        tensor: the weight, with the modules that it is packed as.
        rounder: rounding prepared for the checkpoint.
        magnitudes: largest magnitudes for weights that share a tensor scale; by default only this weight's.
    """
    scheme = tensor.scheme
    height, width = math.prod(tensor.info.shape[:-1]), tensor.info.shape[-1]
    tile, rows_each = scheme.sharing.block_size or 1, height // len(tensor.parts)
    read = partial(checkpoint.read_matrix_rows, tensor.name)
    dtype = scheme.format.scale_dtype(checkpoint.output_dtype(tensor.name))
    rounded = RoundedWeight(rounder, tensor.name, read, (height, width), scheme, dtype, magnitudes)

    def make(first: int, last: int) -> RowBlock:
        rows = read(first, last)
        values = rows.float()
        total = _sum_of_squares(values)
        if not math.isfinite(total):
            check_rows_finite(rows, tensor.name, first)
        codes, scale = rounded.round_rows(first, values)
        rows_of = pack_rows(codes, scale, rounded.scheme)
        if first > 0 and scheme.sharing.spans_rows:
            del rows_of[SCALE]
        pieces: dict[str, tuple[int, Tensor]] = {}
        # All parts of a weight have the same number of rows.
        for part in tensor.parts[first // rows_each : -(-last // rows_each)]:
            here, begins = part.rows_within(first, last), part.first >= first
            for suffix, data in rows_of.items():
                # Rows of codes per row of scales.
                per_row = tile if suffix == SCALE else 1
                whole = suffix == SCALE and scheme.sharing.spans_rows
                some = data if whole else data[here.start // per_row : -(-here.stop // per_row)]
                pieces[part.name(suffix)] = (max(first - part.first, 0) // per_row, some)
            if begins:
                pieces |= {name: (0, data) for name, data in part.shared_tensors(rounded.scheme).items()}
                if tensor.inputs.format.spans_tensor:
                    pieces[part.module + INPUT_GLOBAL] = (0, torch.ones(1))
        # `values` of a float32 source is the memory-mapped file, so only the decoded tensor may be changed in place.
        error = _sum_of_squares(decode_codes(codes, scale, scheme).sub_(values))
        return RowBlock(pieces, error, total)

    return ConversionJob(tensor.name, height, width, tensor.outputs, make, tile)


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum of squares in float32, or in float64 if that overflows.

    A BLAS dot product is faster, but its last bit may depend on the alignment of the values in memory.
    """
    total = float(values.square().sum())
    return total if math.isfinite(total) else float(values.double().square().sum())


def _shards(plan: QuantizationPlan, rounder: Rounder) -> list[Shard]:
    """Return the output files: each tensor stays in the file that it has in the source."""
    magnitudes = Magnitudes(plan.checkpoint, plan.schemes)
    jobs: dict[str, list[ConversionJob]] = {file.name: [] for file in plan.checkpoint.weight_files()}
    for tensor in plan.tensors:
        if tensor.scheme.quantizes:
            job = make_pack_job(plan.checkpoint, tensor, rounder, magnitudes)
        else:
            may_mask = plan.rules is not None and plan.rules.may_be_mask(tensor.name, len(tensor.info.shape))
            job = make_copy_job(plan.checkpoint, tensor.name, tensor.outputs[0].dtype, may_mask)
        jobs[tensor.info.shard].append(job)
    if plan.cache_scales:
        jobs[plan.tensors[0].info.shard] += [_scale_job(*scale) for scale in plan.cache_scales.items()]
    return [Shard(file, jobs[file.name]) for file in plan.checkpoint.weight_files()]


def _scale_job(name: str, scale: float) -> ConversionJob:
    block = RowBlock({name: (0, torch.tensor([scale]))})
    return ConversionJob(name, 1, 1, (OutputTensor(name, torch.float32, (1,)),), lambda *_: block)


def _errors(plan: QuantizationPlan, records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the relative RMS error of each packed weight, from the records of the files written."""
    sums = {name: squares for record in records.values() for name, squares in record["sums"].items()}
    parts = {tensor.name: sums.get(tensor.name, (0.0, 0.0)) for tensor in plan.packed}
    return {name: math.sqrt(error / total) if total else 0.0 for name, (error, total) in parts.items()}
