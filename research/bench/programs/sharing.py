"""Measures the speedup of a sweep by several workers on one machine, in cells per minute, end to end."""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diffquant.benchmarks.cells import BenchCell
from diffquant.errors import DiffQuantError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import SweepResult
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.sweep.workers import run_processes
from diffquant.support.progress import Progress, report_nothing

# Threads share sums in another order. In float32 that changes the last digits only and here and there a code, by which
# an item may turn; in bfloat16 so many roundings that several of 20 items do.
GRID = SweepOptions(bits=(16, 8, 6, 4), targets=("logits", "kv"), dtype="float32", task_options={"limit": 20})
_MAY_TURN = 1


def share_sweep(
    model: Path, counts: Sequence[int], repeats: int, options: SweepOptions = GRID, progress: Progress = report_nothing
) -> list[BenchCell]:
    """Cells of a sweep's cells per minute by number of workers, which share the processor's threads; by turns.

    The start of processes and the loading of models count.

    Raises:
        DiffQuantError: a cell failed, or several items turned out otherwise with another number of workers.
    """
    cells_per_minute: dict[int, list[float]] = {count: [] for count in counts}
    first: dict[str, list[float]] = {}
    for turn in range(repeats):
        for done, count in enumerate(counts):
            progress(turn * len(counts) + done, repeats * len(counts), f"sweep: {count} workers")
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                result = run_sweep([model], options, Path(folder), engine=partial(run_processes, workers=count))
                seconds = time.perf_counter() - start
            result.require_complete()
            _check_alike(result, first, count)
            cells_per_minute[count].append(60 * len(result.cells) / seconds)
    workload = f"{model.name}, {len(first)} cells"
    return [
        BenchCell("sweep", workload, _named(count), unit="cells/min", values=tuple(rates), baseline=_named(counts[0]))
        for count, rates in cells_per_minute.items()
    ]


def _named(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _check_alike(result: SweepResult, first: dict[str, list[float]], count: int) -> None:
    """Check that cells have the items right that the first sweep had, or keep which those are if this is the first."""
    for cell in result.cells:
        values = (cell.result and cell.result.values) or []
        expected = first.setdefault(cell.point.label, values)
        turned = sum(one != other for one, other in zip(values, expected, strict=True))
        if turned > _MAY_TURN:
            raise DiffQuantError(
                f"{cell.point.label}: with {_named(count)} {turned} of {len(values)} items turned out otherwise"
            )
