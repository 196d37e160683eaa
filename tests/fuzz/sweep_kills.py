"""Sweeps whose processes are killed at random, and started again, until they come to an end.

A sweep of cells that sleep runs under an engine. After a random time a worker, the process that started the workers, or
a Ray cluster's head is ended as `kill -9` does. What was started first is then started again until it ends well. Every
cell has to hold what it holds in a sweep that nothing disturbs, and no lock may be left.

    python -m tests.fuzz.sweep_kills --count 200 --json research/results/sweep-kills.json
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import DiffQuantError
from diffquant.measure.sweep.cell import measure_all, remove_locks
from diffquant.measure.sweep.workers import run_processes
from diffquant.support.files import write_json
from diffquant.support.progress import report_nothing
from tests.support.ray_here import RayHere
from tests.support.sleepers import scores, sleeping_run

BATCHES, CELLS, SECONDS = 5, 40, 0.05
# What is killed under each engine. Processes of "folder" are started alone and share nothing but the folder.
VICTIMS = {
    "process": ("driver",),
    "processes": ("worker", "driver"),
    "folder": ("worker",),
    "ray": ("worker", "driver", "head"),
}
_FOLDER_WORKERS = 3
_MOST_STARTS = 8
_SECONDS_TO_END = 300


def drive(engine: str, folder: Path, address: str = "") -> None:
    """Run the sweep that is left, as the process that a person starts."""
    run = sleeping_run(folder, BATCHES, CELLS, SECONDS)
    if engine == "folder":
        measure_all(replace(run, cells=random.sample(run.cells, len(run.cells))))
    elif not run.cells:
        pass  # All was done before the kill, and a sweep then asks no engine.
    elif engine == "ray":
        from diffquant.measure.sweep.ray_cluster import run_on_ray

        run_on_ray(run, report_nothing, address, 2)
    else:
        run_processes(run, report_nothing, {"process": 1, "processes": 2}[engine])
    # As every sweep does in the end, for the cells that it found measured too.
    with tempfile.TemporaryDirectory() as empty:
        every = sleeping_run(Path(empty), BATCHES, CELLS, SECONDS)
    remove_locks([replace(cell, folder=folder) for cell in every.cells])


def survives(engine: str, victim: str, seed: int, place: Path, expected: dict[str, float]) -> str | None:
    """Kill a victim after a random time, and start again what has to be.

    Returns:
        What is wrong in the end; None where every cell is as expected and nothing else is left.
    """
    cluster = RayHere(2) if engine == "ray" else None
    try:
        return _outcome(engine, victim, random.Random(seed), place, expected, cluster)
    finally:
        if cluster:
            cluster.stop()


def _outcome(
    engine: str, victim: str, chance: random.Random, place: Path, expected: dict[str, float], cluster: RayHere | None
) -> str | None:
    shutil.rmtree(place, ignore_errors=True)
    count = _FOLDER_WORKERS if engine == "folder" else 1
    drivers = [_start(engine, place, cluster) for _ in range(count)]
    while len(scores(place)) < 2 and any(driver.poll() is None for driver in drivers):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, CELLS * SECONDS / 2))
    if cluster and victim == "head":
        for pid in (*cluster.head, drivers[0].pid):
            os.kill(pid, signal.SIGKILL)
        cluster.start_again()
    elif pids := _workers(drivers) if victim == "worker" else [driver.pid for driver in drivers]:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(pids), signal.SIGKILL)
    for _ in range(_MOST_STARTS):
        # All are waited for, whatever the first of them ended with.
        statuses = [driver.wait(timeout=_SECONDS_TO_END) for driver in drivers]
        if not any(statuses) and len(scores(place)) == CELLS:
            break
        drivers = [_start(engine, place, cluster)]
    else:
        drivers[0].kill()
        said = _log(place).read_text(errors="replace").strip().splitlines()[-1:]
        return f"started {_MOST_STARTS} times, and ended with {statuses[0]} at last: {''.join(said)}"
    if scores(place) != expected:
        return f"{len(scores(place))} of {CELLS} cells, or others than expected"
    left = [file.name for file in place.iterdir() if file.suffix != ".json"]
    return f"left behind: {', '.join(left)}" if left else None


def _workers(drivers: "list[subprocess.Popen[bytes]]") -> list[int]:
    """Processes that measure: those that drivers have started, Ray's actors, or else the drivers."""
    pids = []
    for process in [each for driver in drivers for each in _children(driver.pid)] or psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "spawn_main" in line or "ray::_Actor" in line:
                pids.append(process.pid)
    return pids or [driver.pid for driver in drivers]


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children()
    return []


def _start(engine: str, place: Path, cluster: RayHere | None) -> "subprocess.Popen[bytes]":
    address = cluster.address if cluster else ""
    call = f"drive({engine!r}, Path({str(place)!r}), {address!r})"
    code = f"from pathlib import Path; from tests.fuzz.sweep_kills import drive; {call}"
    with _log(place).open("wb") as log:
        return subprocess.Popen([sys.executable, "-c", code], stderr=log, stdout=log)


def _log(place: Path) -> Path:
    """What the processes that were started last have printed."""
    return place.with_suffix(".log")


def main(
    count: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 20,
    engine: Annotated[str, typer.Option(help="Engines, separated by commas.")] = "process,processes,folder,ray",
    seed: Annotated[int, typer.Option(help="Seed of what is killed when.")] = 0,
    file: Annotated[Path | None, typer.Option("--json", help="Where to write the counts.")] = None,
) -> None:
    """Kill processes of sweeps at random, and print what did not come back."""
    pairs = [(name, victim) for name in engine.split(",") for victim in VICTIMS[name]]
    if find_spec("ray") is None:
        pairs = [pair for pair in pairs if pair[0] != "ray"]
    started, tried, faults = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        measure_all(sleeping_run(Path(folder, "whole"), BATCHES, CELLS, 0.0))
        expected = scores(Path(folder, "whole"))
        for number in range(count):
            name, victim = pairs[number % len(pairs)]
            fault = survives(name, victim, seed + number, Path(folder, "killed"), expected)
            tried[f"{name}: {victim}"] += 1
            if fault:
                faults.append(f"{name}, {victim} killed, seed {seed + number}: {fault}")
                typer.echo(faults[-1], err=True)
    result: dict[str, Any] = {
        "environment": describe_environment("ray"),
        "cells": {"count": CELLS, "batches": BATCHES, "seconds": SECONDS},
        "seed": seed,
        "kills": dict(tried),
        "came_back": count - len(faults),
        "faults": faults,
        "seconds": round(time.monotonic() - started, 1),
    }
    if file:
        write_json(file, result)
    kills = ", ".join(f"{name} {number}" for name, number in tried.items())
    typer.echo(f"{count - len(faults)} of {count} sweeps came to the same end ({kills})")
    if faults:
        raise DiffQuantError(f"{len(faults)} sweeps did not")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
