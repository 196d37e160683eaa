"""The engine of this machine: this process, or several, on one device each."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffquant.errors import UsageError
from diffquant.support.machine import free_memory, threads
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled
from diffquant.sweep.crew import Crew, End
from diffquant.sweep.orders import Order
from diffquant.sweep.work import Work
from diffquant.sweep.worker import Worker

# Seconds that a worker has to let go of its claim.
_TIME_TO_STOP = 10.0


@dataclass(frozen=True)
class LocalEngine:
    """An engine that runs workers on this machine.

    Attributes:
        workers: number of processes, which share torch's threads; this process where it is 1.
        devices: devices of the processes, in turn, such as ("cuda:0", "cuda:1"); none where all take the one that was
            planned.
        say: function that is told in a line how threads and memory are shared out.
    """

    workers: int = 1
    devices: Sequence[str] = ()
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"the number of workers must be 1 or more, got {self.workers}")

    def run(self, work: Work, progress: Progress) -> None:
        if self.workers == 1:
            Worker(work, progress, device=self.devices[0] if self.devices else None).run(is_patient=True)
            return
        share = max(1, threads() // self.workers)
        self.say(f"{self.workers} workers with {share} thread{'s' * (share > 1)} each; {self._check_memory(work)}")

        def start(place: int) -> _Process:
            device = self.devices[place % len(self.devices)] if self.devices else None
            return _Process(Order(work, place / self.workers, device), share)

        Crew(work, self.workers, start).run(progress)

    def _check_memory(self, work: Work) -> str:
        """Check that every worker can hold a model.

        Returns:
            What is needed, and what is free.

        Raises:
            UsageError: a device has less.
        """
        most = max(batch.subject.held_bytes for batch in work.batches)
        count_by_device: dict[str, int] = {}
        for place in range(self.workers):
            device = self.devices[place % len(self.devices)] if self.devices else work.batches[0].subject.device
            memory = device if device.startswith("cuda") else "main memory"
            count_by_device[memory] = count_by_device.get(memory, 0) + 1
        said = []
        for device, count in count_by_device.items():
            free = free_memory() if device == "main memory" else _free_on(device)
            said.append(f"{count} x {most / 1e9:.2f} GB of weights in {free / 1e9:.2f} GB of {device} that are free")
            if count * most > free:
                raise UsageError(
                    f"too little memory: {said[-1]}; take fewer {spelled('workers')}, or {spelled('device_map')}"
                )
        return ", ".join(said)


def _free_on(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


class _Process:
    """A worker in a process of its own, which ends itself when this one is gone."""

    def __init__(self, order: Order, threads: int) -> None:
        # The path as multiprocessing gives it on, so that the process finds what this one has found.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "diffquant.sweep.worker_process"], stdin=subprocess.PIPE, env=environment
        )
        self.name = f"process {self._process.pid}"
        self._send(pickle.dumps(order))

    def _send(self, content: bytes) -> None:
        pipe = self._process.stdin
        if pipe is None:
            raise ValueError("a worker's process has no pipe")
        try:
            pipe.write(len(content).to_bytes(8) + content)
            pipe.flush()
        except BrokenPipeError:
            pass  # It has ended already, and how is asked for.

    def end(self) -> End | None:
        status = self._process.poll()
        if status is None:
            return None
        return "left" if status == 0 else "failed" if status == 1 else "died"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_TIME_TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
