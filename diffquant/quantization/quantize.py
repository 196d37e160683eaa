"""Quantization of a checkpoint's weights as a stream: memory is a few blocks, and only a rounding builds a model."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.formats.atomic_folder import check_output, staged
from diffquant.formats.compressed_tensors import SCALE, decode_codes, packed_rows
from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import Block, Job, Shard, check_rows, checkpoint_stamp, copy_job, write_shards
from diffquant.quantization.descriptions import write_descriptions
from diffquant.quantization.magnitudes import Magnitudes
from diffquant.quantization.plan import PlannedTensor, QuantizationPlan, plan_quantization
from diffquant.quantization.rounded_weight import RoundedWeight
from diffquant.quantization.roundings import Rounder, rounding_named
from diffquant.recipe import Recipe, RecipeLike
from diffquant.report.sizes import compared_size
from diffquant.scheme import Scheme
from diffquant.source.source import Source, open_source
from diffquant.source.weight_source import WeightSource
from diffquant.support.devices import as_dtype
from diffquant.support.escaping import one_line
from diffquant.support.progress import Progress, progress_for
from diffquant.support.readable import Readable
from diffquant.support.versions import versions


@dataclass(frozen=True)
class TensorError:
    """Relative RMS error of a packed weight: the error's root mean square over the weight's.

    Attributes:
        name: name of the weight in the checkpoint.
        scheme: scheme that it is packed under.
        error: relative RMS error, a share of 1.
    """

    name: str
    scheme: Scheme
    error: float


@dataclass(frozen=True, repr=False)
class Quantization(Readable):
    """The outcome of `quantize`.

    Attributes:
        destination: folder that was written.
        bytes_before: bytes that the source takes.
        bytes_after: bytes of all tensors of the destination.
        weights: number of weights of all tensors.
        packed_bits: mean stored bits of the packed weights, scales included; of all, where none is packed.
        seconds: seconds that this run took.
        resumed: number of shards taken over from an interrupted run.
        errors: error of every packed weight, the worst first.
        rounding: name of the rule that made their codes.
        notes: sentences for people, about what the source's own recipe added or lost, and code that was left out.
    """

    destination: Path
    bytes_before: int
    bytes_after: int
    weights: int
    packed_bits: float
    seconds: float
    resumed: int
    errors: tuple[TensorError, ...]
    rounding: str
    notes: tuple[str, ...] = ()

    def summary(self, worst: int = 3) -> str:
        """A few lines for people, with the `worst` weights by their error."""
        lines = [
            f"{one_line(str(self.destination))}: {compared_size(self.bytes_after, self.bytes_before, self.weights)}, "
            f"in {self.seconds:.1f} s"
            + (f", {self.resumed} shards taken over from an interrupted run" if self.resumed else "")
        ]
        if self.errors:
            mean = sum(e.error for e in self.errors) / len(self.errors)
            lines.append(
                f"{len(self.errors)} weights packed at {self.packed_bits:.2f} stored bits each by {self.rounding}, "
                f"relative RMS error {mean:.2%} on average; the largest:"
            )
            lines += [f"  {e.error:.2%}  {one_line(e.name)}  {e.scheme}" for e in self.errors[:worst]]
        return "\n".join([*lines, *self.notes])


def quantize(
    source: Path | str | Source | WeightSource,
    destination: Path | str,
    recipe: RecipeLike,
    *,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    planned: Callable[[QuantizationPlan], None] | None = None,
    progress: Progress | None = None,
) -> Quantization:
    """Write a quantized copy of a checkpoint, as the verb `quantize` has it done.

    Args:
        source: a folder of safetensors, a .gguf file, or either as an open `Source`; or a folder of any architecture as
            an open `WeightSource`, whose weights are chosen by name.
        destination: the folder to make; it appears whole or not at all.
        recipe: recipe for the weights, as `Recipe.parse` takes it; its cache and logits are only recorded, in
            `diffquant_config`. What the source's own recipe has of them goes along where this one says nothing.
        dtype: dtype in which matrices that are not packed are stored; the checkpoint's by default, bfloat16 where that
            is float32. The model runs in the checkpoint's all the same, unless `load` is told otherwise.
        overwrite: replace an existing checkpoint there, at the end.
        planned: function called with the plan before anything is written; what it raises ends the run.
        progress: function called with layers while a rounding reads a text, then with output bytes; by default a line
            on a terminal, one per minute in a log.

    Raises:
        DiffQuantError: anything wrong with the source, the recipe or the destination; nothing is left then.
        KeyboardInterrupt: finished shards are kept, and the message says how to go on.
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
    if planned is not None:
        planned(plan)
    rounder = rounding_named(recipe.rounding.name).prepare(opened, plan.schemes, recipe.rounding, progress)
    rounded = {"name": recipe.rounding.name, **rounder.identity}
    key = {
        "verb": "quantize",
        "source": checkpoint_stamp(opened.checkpoint),
        "recipe": plan.recipe.to_dict(),
        "rounding": rounded,
        "rules": plan.rules.to_dict() if plan.rules else None,
        "dtype": str(as_dtype(dtype)),
        "versions": versions(),
    }
    with staged(destination, key, plan.bytes_after, overwrite) as staging:
        opened.checkpoint.write_side_files(staging.folder)
        records = write_shards(_shards(plan, rounder), staging, plan.bytes_after, progress)
        errors = _errors(plan, records)
        left_out = write_descriptions(plan, opened, rounded, records, errors, staging.folder)
    by_error = sorted(plan.packed, key=lambda tensor: -errors[tensor.name])
    return Quantization(
        destination,
        plan.bytes_before,
        plan.bytes_after,
        plan.weights,
        plan.packed_bits,
        time.monotonic() - started,
        staging.resumed,
        tuple(TensorError(tensor.name, tensor.scheme, errors[tensor.name]) for tensor in by_error),
        recipe.rounding.name,
        (*plan.notes, *left_out),
    )


def pack_job(
    checkpoint: Checkpoint, tensor: PlannedTensor, rounder: Rounder, magnitudes: Magnitudes | None = None
) -> Job:
    """The job that makes a weight's codes and scales, some rows at a time."""
    scheme = tensor.scheme
    height, width = math.prod(tensor.info.shape[:-1]), tensor.info.shape[-1]
    tile, rows_each = scheme.sharing.tile or 1, height // len(tensor.parts)

    def read(first: int, last: int) -> Tensor:
        return checkpoint.matrix_rows(tensor.name, first, last)

    dtype = scheme.format.scale_dtype(checkpoint.written_dtype(tensor.name))
    rounded = RoundedWeight(rounder, tensor.name, read, (height, width), scheme, dtype, magnitudes)

    def make(first: int, last: int) -> Block:
        rows = read(first, last)
        values = rows.float()
        total = _sum_of_squares(values)
        if not math.isfinite(total):
            check_rows(rows, tensor.name, first)
        codes, scale = rounded.rows(first, values)
        rows_of = packed_rows(codes, scale, rounded.scheme)
        if first > 0 and scheme.sharing.spans_rows:
            del rows_of[SCALE]
        pieces: dict[str, tuple[int, Tensor]] = {}
        # All parts of a weight have as many rows.
        for part in tensor.parts[first // rows_each : -(-last // rows_each)]:
            here, begins = part.within(first, last), part.first >= first
            for suffix, data in rows_of.items():
                # A row of scales is of so many rows of codes.
                per_row = tile if suffix == SCALE else 1
                whole = suffix == SCALE and scheme.sharing.spans_rows
                some = data if whole else data[here.start // per_row : -(-here.stop // per_row)]
                pieces[part.name(suffix)] = (max(first - part.first, 0) // per_row, some)
            if begins:
                pieces |= {name: (0, data) for name, data in part.once(rounded.scheme).items()}
        # Of a float32 source, `values` are the mapped file itself: only what was decoded may be written to.
        error = _sum_of_squares(decode_codes(codes, scale, scheme).sub_(values))
        return Block(pieces, error, total)

    return Job(tensor.name, height, width, tensor.outputs, make, tile)


def _sum_of_squares(values: Tensor) -> float:
    """The sum of squares in float32, or where that overflows in float64.

    A BLAS's dot product is faster, but its last bit may depend on where in memory the values begin.
    """
    total = float(values.square().sum())
    return total if math.isfinite(total) else float(values.double().square().sum())


def _shards(plan: QuantizationPlan, rounder: Rounder) -> list[Shard]:
    """Output files, divided as the source's are, with each tensor in its place."""
    magnitudes = Magnitudes(plan.checkpoint, plan.schemes)
    jobs: dict[str, list[Job]] = {file.name: [] for file in plan.checkpoint.weight_files()}
    for tensor in plan.tensors:
        packs = tensor.scheme.quantizes
        may_mask = plan.rules is not None and plan.rules.may_be_mask(tensor.name, len(tensor.info.shape))
        job = (
            pack_job(plan.checkpoint, tensor, rounder, magnitudes)
            if packs
            else copy_job(plan.checkpoint, tensor.name, tensor.outputs[0].dtype, may_mask)
        )
        jobs[tensor.info.shard].append(job)
    return [Shard(file, jobs[file.name]) for file in plan.checkpoint.weight_files()]


def _errors(plan: QuantizationPlan, records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Relative RMS error of each packed weight, of the records of the files written."""
    sums = {name: squares for record in records.values() for name, squares in record["sums"].items()}
    return {tensor.name: _relative_rms(*sums.get(tensor.name, (0.0, 0.0))) for tensor in plan.packed}


def _relative_rms(error: float, total: float) -> float:
    return math.sqrt(error / total) if total else 0.0
