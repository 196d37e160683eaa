"""Timing of calls that take turns, A B A B, so that what else the machine does falls on all of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, TypeVar

from diffquant.errors import UsageError

# A turn lasts at least this long, so that clocks and launches do not weigh.
_TURN_MS = {"cpu": 20.0, "cuda": 5.0}
_WARM_UPS = 2

Work = Callable[[], object]
# What a turn gives: a time, or whatever else is measured.
Turn = TypeVar("Turn")
Name = TypeVar("Name")


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a measurement's repeats."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Median, smallest and largest of some values."""
    return Spread(median(values), min(values), max(values))


def prepare(work: Work, device: str = "cpu", *, graph: bool = False) -> Callable[[], float]:
    """Warm a call up and find how often a turn must run it; gives what runs one turn, in milliseconds of a call.

    Args:
        device: "cpu" or "cuda"; on CUDA the device's own clock counts.
        graph: replay it as a CUDA graph, without the host's time for launches.

    Raises:
        UsageError: a graph on the CPU.
    """
    if graph and device != "cuda":
        raise UsageError("only CUDA devices have graphs")
    for _ in range(_WARM_UPS):
        work()
    run = _cuda_run(_captured(work) if graph else work) if device == "cuda" else _host_run(work)
    once = max(run(1), 1e-4)
    count = max(1, ceil(_TURN_MS[device] / once))
    return lambda: run(count) / count


def interleaved(calls: Mapping[Name, Callable[[], Turn]], repeats: int) -> dict[Name, list[Turn]]:
    """What every call gave in its turns, one turn of each after the other, `repeats` times."""
    turns: dict[Name, list[Turn]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            turns[name].append(call())
    return turns


def second_call(call: Work, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of a call behind another one, which brings its caches and tables back and wakes threads."""
    call()
    started = clock()
    call()
    return (clock() - started) * 1e3


def clocked(call: Callable[[], Any]) -> dict[str, Any]:
    """Wall and CPU seconds of a call, and what it gave."""
    wall, cpu = time.monotonic(), time.process_time()
    given = call()
    return {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu, "given": given}


def _host_run(work: Work) -> Callable[[int], float]:
    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - started) * 1e3

    return run


def _cuda_run(work: Work) -> Callable[[int], float]:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(count: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return run


def _captured(work: Work) -> Work:
    import torch

    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        # A graph knows addresses alone: the tensors there live as long as what it was captured of.
        _ = work
        graph.replay()

    return replay
