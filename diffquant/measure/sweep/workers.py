"""Shares a sweep's cells among workers: processes here, or actors of a Ray cluster. No torch at the top."""

import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from functools import cache
from multiprocessing import active_children, connection, get_context, parent_process
from threading import Thread
from typing import Protocol

from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.sweep.cell import Run, Worker, check_cells_folder, measure_all, remove_locks
from diffquant.support.machine import available_memory, threads
from diffquant.support.names import option_name
from diffquant.support.progress import Progress

_SECONDS_BETWEEN_LOOKS = 1.0

_logger = logging.getLogger(__name__)


class RemoteWorker(Protocol):
    """A `Worker` in another process or on another machine."""

    def measure(self, number: int, is_patient: bool) -> "Future[bool]":
        """Start `Worker.measure` and return its future result.

        Raises:
            BrokenExecutor: the worker has died.
        """

    def result(self, future: "Future[bool]") -> bool:
        """Return the result of a finished call.

        Raises:
            BrokenExecutor: the worker died; the message names the worker, and the signal or exit code.
        """

    def stop(self) -> None:
        """End the worker at once."""


def distribute_cells(run: Run, size: int, start: Callable[[int], RemoteWorker], progress: Progress) -> None:
    """Measure a run's cells with up to `size` workers.

    A worker first takes cells with the weights that it holds, then cells with weights that no other worker is using. If
    a worker dies, the cell that it was measuring is recorded as failed, and a new worker replaces it.

    Args:
        start: starts the worker with a given index, counted from 0.

    Raises:
        DiffQuantError: the folder of the cells is gone, or a worker dies before it measures anything.
        OSError: the folder cannot be written.
    """
    cells, size = run.cells, min(size, len(run.cells))
    weights = [cell.weights_key for cell in cells]
    left, held, is_patient = list(range(len(cells))), list[int](), False
    remotes: dict[int, RemoteWorker] = {}
    at: dict[int, object] = {}  # The weights that each worker holds.
    calls: dict[Future[bool], tuple[int, int]] = {}
    try:
        while left or calls:
            for place in sorted(set(range(size)) - {place for place, _ in calls.values()})[: len(left)]:
                busy = [weights[number] for _, number in calls.values()]
                mine = (number for number in left if weights[number] == at.get(place))
                free = (number for number in left if weights[number] not in busy)
                number = next(mine, next(free, left[0]))
                if place not in remotes:
                    remotes[place] = start(place)
                try:
                    call = remotes[place].measure(number, is_patient)
                except BrokenExecutor:  # It died between two cells, so no cell is lost.
                    remotes.pop(place).stop()
                    at.pop(place, None)
                    continue
                left.remove(number)
                calls[call], at[place] = (place, number), weights[number]
            done, _ = wait(calls, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            check_cells_folder(cells[0].folder)
            for call in done:
                place, number = calls.pop(call)
                try:
                    if not remotes[place].result(call):
                        held.append(number)
                except BrokenExecutor as error:
                    remotes.pop(place).stop()
                    at.pop(place)
                    cells[number].write_failure(f"{error} while it measured this cell")
                    remove_locks([cells[number]])
                    _logger.warning("%s while it measured %s; another worker replaces it", error, cells[number].caption)
            progress(len(cells) - len(left) - len(held) - len(calls), len(cells), f"{size} workers")
            if not left and not calls:
                # Finally, wait for the cells that other sweeps were measuring.
                left, held, is_patient = held, [], True
    finally:
        for remote in remotes.values():
            remote.stop()


def run_processes(
    run: Run,
    progress: Progress,
    workers: int = 1,
    devices: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure cells with workers on this machine.

    Args:
        workers: number of processes, which share torch's threads; 1 means this process.
        devices: devices to assign to the processes in turn, such as ("cuda:0", "cuda:1"). If empty, every process uses
            the device that the run was planned with.
        say: called with a line on how threads and memory are divided among the workers.

    Raises:
        UsageError: the workers need more memory than is available.
        DiffQuantError: the folder of the cells is gone, or a worker dies before it measures anything.
    """
    devices_by_place = [devices[place % len(devices)] if devices else None for place in range(workers)]
    if workers == 1:
        measure_all(run, progress, devices_by_place[0])
        return
    each = max(1, threads() // workers)
    memory = _check_memory(run, devices_by_place)
    say(f"{workers} workers with {each} thread{'s' * (each > 1)} each; {memory}")
    content = pickle.dumps(run)
    distribute_cells(run, workers, lambda place: WorkerProcess(content, devices_by_place[place], each), progress)


def _check_memory(run: Run, devices_by_place: Sequence[str | None]) -> str:
    """Check that there is memory for one model per worker.

    Returns:
        A line that says how much memory is needed and free.

    Raises:
        UsageError: a device has less.
    """
    most = max(run.subject_of(cell).peak_weight_bytes for cell in run.cells)
    places = [device or run.subject_of(run.cells[0]).device for device in devices_by_place]
    memories = [device if device.startswith("cuda") else "main memory" for device in places]
    said = []
    for memory in dict.fromkeys(memories):
        count, free = memories.count(memory), available_memory() if memory == "main memory" else _free_on(memory)
        said.append(f"{count} x {most / 1e9:.2f} GB of weights, {free / 1e9:.2f} GB of {memory} free")
        if count * most > free:
            raise UsageError(
                f"too little memory: {said[-1]}; take fewer {option_name('workers')}, or {option_name('device_map')}"
            )
    return ", ".join(said)


def _free_on(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


class WorkerProcess:
    """A worker in a separate process, which ends when this one ends."""

    def __init__(self, run: bytes, device: str | None, threads: int) -> None:
        """Start the process.

        Args:
            run: the pickled run.
            device: device that computes, by default the planned one.
            threads: number of torch's threads.

        Raises:
            DiffQuantError: the process died at once.
        """
        # The current folder may be a model's, so no module may be imported from it.
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            # Making a pool also starts multiprocessing's resource tracker.
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (run, device, threads))
            pid = self._pool.submit(os.getpid).result()
        except BrokenExecutor as error:
            raise DiffQuantError("workers die before they measure anything; use fewer if memory is short") from error
        finally:
            del os.environ["PYTHONSAFEPATH"]
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before
        self._process = next(process for process in active_children() if process.pid == pid)

    def measure(self, number: int, is_patient: bool) -> "Future[bool]":
        return self._pool.submit(_measure, number, is_patient)

    def result(self, future: "Future[bool]") -> bool:
        try:
            return future.result()
        except BrokenExecutor as error:
            # The pool's thread reaps the process; if two threads reap it at once, neither may get its exit status.
            self._pool.shutdown()
            raise BrokenExecutor(
                f"the worker in process {self._process.pid} {_ending(self._process.exitcode)}"
            ) from error

    def stop(self) -> None:
        # Killing it damages nothing: files are written atomically, and the system releases the lock.
        self._process.kill()
        self._pool.shutdown(cancel_futures=True)


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", as when memory runs out," if name == "SIGKILL" else "")


_begun: list[Callable[[], Worker]] = []


def _begin(run: bytes, device: str | None, threads: int) -> None:
    """Prepare a worker's process; its run is unpickled at the first call, since that imports torch."""
    # Ignore these signals: the process that started this one ends it.
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)

    def make() -> Worker:
        worker = Worker(pickle.loads(run), device)
        if "torch" in sys.modules:
            # If a script imports torch at its top, it was imported before the variable was set.
            sys.modules["torch"].set_num_threads(threads)
        return worker

    _begun.append(cache(make))


def _measure(number: int, is_patient: bool) -> bool:
    return _begun[0]().measure(number, is_patient)


def _end_with_parent() -> None:
    parent = parent_process()
    with suppress(OSError):
        connection.wait([parent.sentinel] if parent else [])
    os._exit(1)
