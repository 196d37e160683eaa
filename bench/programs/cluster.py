"""Measures the overhead of sharing a sweep among many workers: cells only sleep, and all other time is overhead.

    python -m diffquant.bench.programs.cluster --json bench/results/cluster.json

Workers hold their first claim before time is taken, so that the start of processes does not count. The best time is
that of the worker with the most cells if they are shared out evenly; all beyond it is lost.
"""

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.bench.environment import environment
from diffquant.bench.programs.apart import JsonFile
from diffquant.bench.programs.ray_here import RayHere
from diffquant.bench.programs.sleepers import scores, sleeping_work
from diffquant.errors import DiffQuantError
from diffquant.support.files import write_json
from diffquant.support.progress import Progress
from diffquant.sweep.claims import latest_claims
from diffquant.sweep.crew import End, Member, keep_at_work
from diffquant.sweep.work import Work
from diffquant.sweep.worker import Worker


@dataclass
class Gate:
    """A gate that opens when every worker waits before it.

    Attributes:
        opened: time at which it opened; None before.
    """

    file: Path
    folder: Path
    workers: int
    opened: float | None = None

    def __call__(self, done: float, total: float, what: str) -> None:  # noqa: ARG002
        if self.opened is None and len(latest_claims(os.listdir(self.folder))) == self.workers:
            self.file.touch()
            self.opened = time.monotonic()


def main(
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 64,
    cells: Annotated[int, typer.Option(min=1, help="Number of cells.")] = 2000,
    seconds: Annotated[float, typer.Option(help="Time that a cell sleeps.")] = 2.0,
    batches: Annotated[int, typer.Option(min=1, help="Number of batches that the cells are in.")] = 100,
    engine: Annotated[str, typer.Option(help="folder, ray, or both, separated by commas.")] = "folder,ray",
    file: JsonFile = None,
) -> None:
    """Measure the share of a sweep's time that is lost to sharing it."""
    runs = {name: measure_loss(_ENGINES[name], workers, cells, batches, seconds) for name in engine.split(",")}
    settings = {"workers": workers, "cells": cells, "batches": batches, "seconds": seconds}
    if file:
        result = {"environment": environment("ray"), "settings": settings, "runs": runs}
        write_json(file, result)
    for name, run in runs.items():
        typer.echo(f"{name}: {run['seconds']:.1f} s where {run['best']:.1f} s are best, {run['lost']:.1%} lost")


def measure_loss(
    run: Callable[[Work, int, Progress], None], workers: int, cells: int, batches: int, seconds: float
) -> dict[str, Any]:
    """Seconds that a sweep takes, the best possible, the share that is lost, and what this machine's processors did.

    Those of Ray's workers do not count, since they are no children of this process.

    Raises:
        DiffQuantError: cells are missing in the end.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "cells")
        gate = Gate(Path(place, "open"), folder, workers)
        before = sum(os.times()[:4])
        run(sleeping_work(folder, batches, cells, seconds, gate=gate.file), workers, gate)
        took = time.monotonic() - (gate.opened or math.nan)
        computed = sum(os.times()[:4]) - before
        if len(scores(folder)) != cells:
            raise DiffQuantError(f"{cells - len(scores(folder))} of {cells} cells are missing")
    best = math.ceil(cells / workers) * seconds
    return {"seconds": took, "best": best, "lost": 1 - best / took, "processor_seconds_per_cell": computed / cells}


def _fork(worker: Worker) -> Member:
    """Start a worker in a process that is forked, which costs nothing."""
    process = multiprocessing.get_context("fork").Process(target=worker.run)
    process.start()

    def end() -> End | None:
        if process.is_alive():
            return None
        return "left" if process.exitcode == 0 else "died"

    def stop() -> None:
        process.terminate()
        process.join()

    return Member(f"process {process.pid}", end, stop)


def _on_folder(work: Work, workers: int, progress: Progress) -> None:
    keep_at_work(work, workers, lambda place: _fork(Worker(work, place / workers)), progress)


def _on_ray(work: Work, workers: int, progress: Progress) -> None:
    from diffquant.sweep.engines.ray_cluster import run_on_ray

    cluster = RayHere(workers)
    try:
        run_on_ray(work, progress, cluster.address, workers)
    finally:
        cluster.stop()


_ENGINES: dict[str, Callable[[Work, int, Progress], None]] = {"folder": _on_folder, "ray": _on_ray}


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
