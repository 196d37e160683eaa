"""Writes checkpoints as a stream of rows, in blocks that a pool of single-threaded workers converts.

Memory is a few blocks per worker, whatever the size of a tensor or checkpoint: sources are mapped and read a few rows
at a time, and results are written directly to their place in the file.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.folder import INDEX, SINGLE
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.staging import Staging
from diffquant.checkpoints.writer import OutputTensor, ShardFile
from diffquant.errors import CheckpointError
from diffquant.recipe.numbers.absmax import check_finite
from diffquant.support.digests import content_digest
from diffquant.support.files import write_atomically
from diffquant.support.machine import cores
from diffquant.support.names import option_name
from diffquant.support.progress import Progress

# Float32 intermediates of a block stay within a core's cache; larger blocks are much slower.
BLOCK_ELEMENTS = 1 << 18
# Number of blocks that workers are given in advance.
_AHEAD = 64


@dataclass(frozen=True)
class RowBlock:
    """Rows of one or more output tensors, and their rounding error.

    Attributes:
        pieces: for each output tensor, by name, the index of its first row in this block, and its rows in the block.
        error, total: sums of squares of the rounding error and of the source's values.
    """

    pieces: Mapping[str, tuple[int, Tensor]]
    error: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class ConversionJob:
    """The conversion of one source tensor into output tensors, a block of rows at a time.

    Attributes:
        name: name of the source tensor, or of the output if there is no source tensor.
        rows, width: number of rows to convert, and of elements in a row.
        outputs: tensors to write.
        make: function from the first and last (exclusive) row of a block to the block.
        together: number of consecutive rows that must be in one block.
    """

    name: str
    rows: int
    width: int
    outputs: tuple[OutputTensor, ...]
    make: Callable[[int, int], RowBlock]
    together: int = 1


@dataclass(frozen=True)
class Shard:
    """One output file.

    Attributes:
        source: source file whose digest is recorded with the output's, or None if there is none.
        jobs: jobs that together write all tensors of the file.
    """

    source: Path | None
    jobs: Sequence[ConversionJob]

    @property
    def outputs(self) -> list[OutputTensor]:
        return [output for job in self.jobs for output in job.outputs]


def row_blocks(rows: int, width: int, multiple_of: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the first and last (exclusive) row of each block of a matrix [rows, width].

    Args:
        multiple_of: blocks begin at multiples of this number of rows.
    """
    height = multiple_of * max(1, BLOCK_ELEMENTS // max(1, width) // multiple_of)
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def make_copy_job(checkpoint: Checkpoint, name: str, dtype: torch.dtype, may_be_mask: bool = False) -> ConversionJob:
    """Return the job that copies a tensor, converted to `dtype`, and raises NonFiniteError for NaN and infinity.

    Args:
        may_be_mask: whether the tensor may be a buffer with a mask, in which -inf is valid.
    """
    info = checkpoint.tensors[name]

    def make(first: int, last: int) -> RowBlock:
        rows = checkpoint.read_rows(name, slice(first, last)) if info.shape else checkpoint.read(name).reshape(1)
        if not rows.is_floating_point():
            return RowBlock({name: (first, convert_rows(rows, dtype, name))})
        masked = rows == -math.inf if may_be_mask and rows.itemsize > 1 else None
        finite = rows if masked is None else rows.masked_fill(masked, 0)
        check_rows_finite(finite, name, first)
        data = convert_rows(finite, dtype, name)
        return RowBlock({name: (first, data if masked is None else data.masked_fill(masked, -math.inf))})

    rows, *rest = info.shape or (1,)
    return ConversionJob(name, rows, max(1, math.prod(rest)), (OutputTensor(name, dtype, info.shape),), make)


def check_rows_finite(rows: Tensor, name: str, first: int) -> None:
    """Check that consecutive rows of a tensor are finite.

    Args:
        name: name of the tensor, for the message.
        first: index of the first row, for the message.

    Raises:
        NonFiniteError: a value is not finite; the tensor and the rows are named.
    """
    check_finite(rows, f"{name}, rows {first} to {first + len(rows) - 1},")


def convert_rows(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert finite rows of a tensor to the dtype in which they are written.

    Raises:
        CheckpointError: a value is beyond the dtype's range.
    """
    converted = rows.to(dtype)
    # float16 has a smaller range than bfloat16 or float32.
    if dtype != rows.dtype and not torch.isfinite(converted).all():
        raise CheckpointError(
            f"{name} has values up to {rows.abs().max().item():g}, which overflow {dtype}; write it with "
            f"{option_name('dtype', 'bfloat16')} or float32"
        )
    return converted


def write_shards(
    shards: Sequence[Shard], staging: Staging, total_bytes: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Write the shards that an interrupted run has not finished, and the index if there are several shards.

    Args:
        shards: output files in order.
        staging: folder to write into, with the record of finished shards.
        total_bytes: size of the output, for the index and the progress.
        progress: called with the number of output bytes so far.

    Returns:
        Records by file name. A record has the "digest" of the file, the "source_digest" of its source file, and "sums":
        by source tensor, the sum of squares of the rounding error and that of the values.
    """
    names = shard_names(len(shards))
    records: dict[str, dict[str, Any]] = {}
    done = 0.0
    with open_workers() as pool:
        finishing: list[tuple[str, Future[dict[str, Any]]]] = []
        for name, shard in zip(names, shards, strict=True):
            size = sum(output.nbytes for output in shard.outputs)
            record = staging.find_finished(name)
            if record is not None:
                records[name] = record
            else:
                digest = None if shard.source is None else pool.submit(content_digest, shard.source)
                sums = _write_shard(shard, staging.folder / name, pool, progress, done, total_bytes)
                # Hashing this file overlaps with the next one's work.
                finishing.append((name, pool.submit(_finish, staging, name, digest, sums)))
            done += size
        records |= {name: future.result() for name, future in finishing}
    progress(total_bytes, total_bytes, "done")
    if len(shards) > 1:
        _write_index(staging.folder, names, shards, total_bytes)
    return {name: records[name] for name in names}


def shard_names(count: int) -> list[str]:
    """Return the names of the files of a checkpoint with `count` shards, as in transformers."""
    return [SINGLE] if count == 1 else [f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)]


def checkpoint_key(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return plain data that identifies a checkpoint without reading tensors: config, file names, sizes and dates."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in checkpoint.weight_files()}
    return {"path": str(checkpoint.path.resolve()), "config": checkpoint.config, "files": files}


def _write_shard(
    shard: Shard, path: Path, pool: ThreadPoolExecutor, progress: Progress, done: float, total_bytes: int
) -> dict[str, list[float]]:
    """Write one file; return sums of squares by job, added in row order so that they never depend on timing.

    Args:
        done: number of bytes of earlier files, to which the progress adds this one's.
        total_bytes: number of bytes of all files.
    """
    sums: dict[str, list[float]] = {}
    with closing(ShardFile(path, shard.outputs)) as file:

        def make_and_write(job: ConversionJob, first: int, last: int) -> tuple[str, int, float, float]:
            block = job.make(first, last)
            for name, (row, data) in block.pieces.items():
                file.write(name, data, row)
            written = sum(data.nbytes for _, data in block.pieces.values())
            return job.name, written, block.error, block.total

        tasks = ((job, *rows) for job in shard.jobs for rows in row_blocks(job.rows, job.width, job.together))
        for name, written, error, total in map_in_order(pool, make_and_write, tasks):
            error_before, total_before = sums.get(name, (0.0, 0.0))
            sums[name] = [error_before + error, total_before + total]
            done += written
            progress(done, total_bytes, name)
    return {name: [error, total] for name, (error, total) in sums.items() if total}


def map_in_order(pool: ThreadPoolExecutor, work: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Call `work` in a pool of threads for each task, and yield the results in the order of the tasks.

    If a call raises an error, the remaining tasks are not run.

    Args:
        tasks: arguments of each call.
    """
    futures = deque(pool.submit(work, *task) for task in islice(tasks, _AHEAD))
    try:
        while futures:
            result = futures[0].result()
            futures.popleft()
            futures.extend(pool.submit(work, *task) for task in islice(tasks, 1))
            yield result
    finally:
        for future in futures:
            future.cancel()
        # A worker may still be writing to the file that is about to be closed.
        for future in futures:
            if not future.cancelled():
                future.exception()


def _finish(
    staging: Staging, name: str, digest: "Future[str] | None", sums: Mapping[str, list[float]]
) -> dict[str, Any]:
    return staging.record_finished(name, {"source_digest": digest and digest.result(), "sums": dict(sums)})


@contextmanager
def open_workers() -> Iterator[ThreadPoolExecutor]:
    """Open a pool with one thread per core, in which torch uses one thread each, since blocks are too small to split.

    A new thread inherits the number of threads that torch is set to when the thread starts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(cores(), thread_name_prefix="diffquant")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _write_index(folder: Path, names: Sequence[str], shards: Sequence[Shard], total_bytes: int) -> None:
    weight_map = {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard.outputs}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
