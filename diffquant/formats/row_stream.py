"""Rows as a stream, with which every verb writes a checkpoint: blocks go through a pool of single-threaded workers.

Memory is a few blocks a worker, whatever a tensor's or a checkpoint's size: sources are mapped and
read some rows at a time, results go straight to their place in the file.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.folder import INDEX, SINGLE
from diffquant.formats.reader import Checkpoint
from diffquant.formats.staging import Staging
from diffquant.formats.writer import OutputTensor, ShardFile
from diffquant.numbers.absmax import check_finite
from diffquant.support.digests import content_digest
from diffquant.support.files import write_atomically
from diffquant.support.machine import cores
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled

# Float32 intermediates of a block stay within a core's cache; larger blocks are much slower.
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Block:
    """Rows of one or more output tensors, and the rounding error made in them.

    Attributes:
        pieces: first row and the rows from there on, by output tensor.
        error, total: sums of squares of the rounding error and of the source's values.
    """

    pieces: Mapping[str, tuple[int, Tensor]]
    error: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Job:
    """The making of the output that comes of one source tensor, any rows at a time.

    Attributes:
        name: name of the source tensor, or of the output where there is none.
        rows, width: number of rows to go through, and of source elements in each.
        outputs: tensors to write.
        make: function from the first and last (exclusive) row to their block.
        together: rows that no block parts.
    """

    name: str
    rows: int
    width: int
    outputs: tuple[OutputTensor, ...]
    make: Callable[[int, int], Block]
    together: int = 1

    def blocks(self) -> Iterator[tuple[int, int]]:
        return row_blocks(self.rows, self.width, self.together)


@dataclass(frozen=True)
class Shard:
    """One output file: the jobs that fill it, and the source file whose digest its record is to hold, if any."""

    source: Path | None
    jobs: Sequence[Job]

    @property
    def outputs(self) -> list[OutputTensor]:
        return [output for job in self.jobs for output in job.outputs]


def row_blocks(rows: int, width: int, together: int = 1) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) row of each block of a tensor [rows, width], in which so many rows lie together."""
    height = together * max(1, BLOCK_ELEMENTS // max(1, width) // together)
    return ((first, min(first + height, rows)) for first in range(0, rows, height))


def copy_job(checkpoint: Checkpoint, name: str, dtype: torch.dtype, may_mask: bool = False) -> Job:
    """The job that takes a tensor over in a dtype, refusing NaN and infinity.

    Args:
        may_mask: whether the tensor may be a buffer, in which -inf is what it masks with.
    """
    info = checkpoint.tensors[name]

    def make(first: int, last: int) -> Block:
        rows = checkpoint.read_rows(name, slice(first, last)) if info.shape else checkpoint.read(name).reshape(1)
        if not rows.is_floating_point():
            return Block({name: (first, in_dtype(rows, dtype, name))})
        masked = rows == -math.inf if may_mask and rows.itemsize > 1 else None
        finite = rows if masked is None else rows.masked_fill(masked, 0)
        check_rows(finite, name, first)
        data = in_dtype(finite, dtype, name)
        return Block({name: (first, data if masked is None else data.masked_fill(masked, -math.inf))})

    rows, *rest = info.shape or (1,)
    return Job(name, rows, max(1, math.prod(rest)), (OutputTensor(name, dtype, info.shape),), make)


def check_rows(rows: Tensor, name: str, first: int) -> None:
    """Check that some rows of a tensor are finite.

    Raises:
        NonFiniteError: some value is not; the tensor and the rows are named.
    """
    check_finite(rows, f"{name}, rows {first} to {first + len(rows) - 1},")


def in_dtype(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Some finite rows of a tensor in the dtype that they are written in.

    Raises:
        CheckpointError: the dtype does not reach as far.
    """
    converted = rows.to(dtype)
    # Two half types take as many bytes and do not reach as far.
    if dtype != rows.dtype and not torch.isfinite(converted).all():
        raise CheckpointError(
            f"{name} would hold values of up to {rows.abs().max().item():g}, which overflow {dtype}; write it with "
            f"{spelled('dtype', 'bfloat16')} or float32"
        )
    return converted


def write_shards(
    shards: Sequence[Shard], staging: Staging, total_bytes: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Write the shards that are not there yet, and the index where there are several.

    Args:
        shards: output files in order.
        staging: folder to write into, which knows the shards that are finished.
        total_bytes: size of the output, for the index and the progress.
        progress: called with output bytes.

    Returns:
        A record of each file by its name: "digest", "source_digest" and "sums", the rounding error's and the
        values' sums of squares by source tensor.
    """
    names = shard_names(len(shards))
    records: dict[str, dict[str, Any]] = {}
    done = 0.0
    with workers() as pool:
        finishing: list[tuple[str, Future[dict[str, Any]]]] = []
        for name, shard in zip(names, shards, strict=True):
            size = sum(output.nbytes for output in shard.outputs)
            record = staging.finished(name)
            if record is not None:
                records[name] = record
            else:
                digest = pool.submit(_source_digest, shard.source)
                sums = _write_shard(shard, staging.folder / name, pool, _progress_after(progress, done, total_bytes))
                # Hashing this file overlaps with the next one's work.
                finishing.append((name, pool.submit(_finish, staging, name, digest, sums)))
            done += size
        records |= {name: future.result() for name, future in finishing}
    progress(total_bytes, total_bytes, "done")
    if len(shards) > 1:
        _write_index(staging.folder, names, shards, total_bytes)
    return {name: records[name] for name in names}


def shard_names(count: int) -> list[str]:
    """Names of the files of a checkpoint that is divided into `count`, as transformers gives them."""
    return [SINGLE] if count == 1 else [f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)]


def checkpoint_stamp(checkpoint: Checkpoint) -> dict[str, Any]:
    """Plain data that tells sources apart without reading them: config, and the files' names, sizes and dates."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in checkpoint.weight_files()}
    return {"path": str(checkpoint.path.resolve()), "config": checkpoint.config, "files": files}


def _write_shard(
    shard: Shard, path: Path, pool: ThreadPoolExecutor, progress: Callable[[float, str], None]
) -> dict[str, list[float]]:
    """Fill one file; sums of squares by job, added up in row order so that they never depend on timing."""
    sums: dict[str, list[float]] = {}
    done = 0.0
    with ShardFile(path, shard.outputs) as file:

        def make_and_write(job: Job, first: int, last: int) -> tuple[str, int, float, float]:
            block = job.make(first, last)
            for name, (row, data) in block.pieces.items():
                file.write(name, data, row)
            written = sum(data.nbytes for _, data in block.pieces.values())
            return job.name, written, block.error, block.total

        tasks = ((job, first, last) for job in shard.jobs for first, last in job.blocks())
        for name, written, error, total in in_order(pool, make_and_write, tasks):
            error_before, total_before = sums.get(name, (0.0, 0.0))
            sums[name] = [error_before + error, total_before + total]
            done += written
            progress(done, name)
    return {name: [error, total] for name, (error, total) in sums.items() if total}


def in_order(
    pool: ThreadPoolExecutor, work: Callable[..., Any], tasks: Iterator[tuple[Any, ...]], ahead: int = 64
) -> Iterator[Any]:
    """Results of `work` in the order of `tasks`, with few tasks under way; on an error the rest is dropped."""
    futures = deque(pool.submit(work, *task) for task in islice(tasks, ahead))
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
    staging: Staging, name: str, digest: "Future[str | None]", sums: Mapping[str, list[float]]
) -> dict[str, Any]:
    return staging.finish(name, {"source_digest": digest.result(), "sums": dict(sums)})


def _source_digest(source: Path | None) -> str | None:
    return None if source is None else content_digest(source)


def _progress_after(progress: Progress, before: float, total: float) -> Callable[[float, str], None]:
    return lambda done, what: progress(before + done, total, what)


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """A pool of one thread a core, each with torch at one thread: blocks are too small to be worth splitting further.

    A new thread takes over the number of threads torch is set to when it starts.
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
