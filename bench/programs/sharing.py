"""What a sweep gains by several workers on one machine: cells per minute, end to end."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from diffquant.bench.cells import BenchCell
from diffquant.errors import DiffQuantError
from diffquant.support.progress import Progress, silent
from diffquant.sweep.engines.local import LocalEngine
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.result import SweepResult
from diffquant.sweep.run import run_sweep

GRID = SweepOptions(bits=(16, 8, 6, 4), targets=("logits", "kv"), task_options={"limit": 20})
# Threads share sums in another order, so the last digits differ.
_TOLERANCE = 1e-3


def share_sweep(
    model: Path, counts: Sequence[int], repeats: int, options: SweepOptions = GRID, progress: Progress = silent
) -> list[BenchCell]:
    """Cells of a sweep's cells per minute by number of workers, which share the processor's threads; by turns.

    The start of processes and the loading of models count.

    Raises:
        DiffQuantError: a cell failed, or another number of workers found another score.
    """
    cells_per_minute: dict[int, list[float]] = {count: [] for count in counts}
    scores: dict[str, float | None] = {}
    for turn in range(repeats):
        for done, count in enumerate(counts):
            progress(turn * len(counts) + done, repeats * len(counts), f"sweep: {count} workers")
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                result = run_sweep([model], options, Path(folder), engine=LocalEngine(count))
                seconds = time.perf_counter() - start
            result.require_complete()
            _check_alike(result, scores, count)
            cells_per_minute[count].append(60 * len(result.cells) / seconds)
    workload = f"{model.name}, {len(scores)} cells"
    return [
        BenchCell("sweep", workload, _named(count), unit="cells/min", values=tuple(rates), baseline=_named(counts[0]))
        for count, rates in cells_per_minute.items()
    ]


def _named(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _check_alike(result: SweepResult, scores: dict[str, float | None], count: int) -> None:
    """Check that cells have the scores of the first sweep, or keep them if this is the first."""
    for cell in result.cells:
        score = cell.result.score if cell.result else None
        first = scores.setdefault(cell.point.label, score)
        if score != first and (score is None or first is None or abs(score - first) > _TOLERANCE):
            raise DiffQuantError(f"{cell.point.label}: {_named(count)} found {score}, and the first sweep {first}")
