"""The engine for one machine: several processes, each on one device."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from diffquant.errors import UsageError
from diffquant.support.machine import free_memory, threads
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled
from diffquant.sweep.crew import End, Member, keep_at_work
from diffquant.sweep.work import Work
from diffquant.sweep.worker import Worker

# Seconds that a worker gets to release its claim.
_TIME_TO_STOP = 10.0


def run_processes(
    work: Work,
    progress: Progress,
    workers: int,
    devices: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure cells with workers on this machine.

    Args:
        workers: number of processes, which share torch's threads; 1 means this process.
        devices: devices to give the processes in turn, such as ("cuda:0", "cuda:1"); empty to use the planned one.
            say: called with a line on how threads and memory are shared out.

    Raises:
        UsageError: there is less memory than the workers need.
        DiffQuantError: the folder of the cells is gone, or no worker is left that could measure them.
    """
    devices_by_place = [devices[place % len(devices)] if devices else None for place in range(workers)]
    if workers == 1:
        Worker(work, device=devices_by_place[0]).run(progress)
        return
    share = max(1, threads() // workers)
    memory = _check_memory(work, devices_by_place)
    say(f"{workers} workers with {share} thread{'s' * (share > 1)} each; {memory}")

    def start(place: int) -> Member:
        return _start_process(Worker(work, place / workers, devices_by_place[place]), share)

    keep_at_work(work, workers, start, progress)


def _check_memory(work: Work, devices_by_place: Sequence[str | None]) -> str:
    """Check that there is memory for one model per worker.

    Returns:
        A line that says how much memory is needed and free.

    Raises:
        UsageError: a device has less.
    """
    most = max(job.subject.held_bytes for job in work.jobs)
    places = [device or work.jobs[0].subject.device for device in devices_by_place]
    memories = [device if device.startswith("cuda") else "main memory" for device in places]
    said = []
    for memory in dict.fromkeys(memories):
        count, free = memories.count(memory), free_memory() if memory == "main memory" else _free_on(memory)
        said.append(f"{count} x {most / 1e9:.2f} GB of weights in {free / 1e9:.2f} GB of {memory} that are free")
        if count * most > free:
            raise UsageError(
                f"too little memory: {said[-1]}; take fewer {spelled('workers')}, or {spelled('device_map')}"
            )
    return ", ".join(said)


def _free_on(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _start_process(worker: Worker, threads: int) -> Member:
    """Start a worker in a new process, which ends when this one does."""
    # Pass sys.path on, as multiprocessing does, so that the worker imports the same modules, and with -P no others:
    # `python -m` would look into the current folder first, which may be a model's.
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "diffquant.sweep.worker_process"], stdin=subprocess.PIPE, env=environment
    )
    content = pickle.dumps(worker)
    pipe = process.stdin
    if pipe is None:
        raise ValueError("a worker's process has no pipe")
    with suppress(BrokenPipeError):  # The worker has ended already; `end` will report how.
        pipe.write(len(content).to_bytes(8) + content)
        pipe.flush()

    def end() -> End | None:
        status = process.poll()
        if status is None:
            return None
        return "left" if status == 0 else "failed" if status == 1 else "died"

    def stop() -> None:
        process.terminate()
        try:
            process.wait(_TIME_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return Member(f"process {process.pid}", end, stop)
