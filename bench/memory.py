"""Memory of processes as Linux counts it, and of a CUDA device as torch's allocator does."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Resident:
    """Memory of a process, in bytes.

    Attributes:
        peak: largest resident set so far, mapped files included.
        anonymous: resident set now, without mapped files.
    """

    peak: int
    anonymous: int


def resident(process: int | str = "self") -> Resident:
    """Memory of a process; zeros where it has ended and its memory is released.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return Resident(status_bytes(status, "VmHWM"), status_bytes(status, "RssAnon"))


def status_bytes(status: str, name: str) -> int:
    """Bytes that a line of /proc/PID/status gives; 0 where the line is absent."""
    values = (line.split()[1] for line in status.splitlines() if line.startswith(name + ":"))
    return 1024 * int(next(values, "0"))


def restart_peak() -> int:
    """Set this process's peak back to what it holds now; returns that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident().peak


class AnonymousPeak:
    """Watches the anonymous memory of this process while a block runs.

    Attributes:
        before: anonymous bytes when the block began.
        peak: largest number of anonymous bytes seen.
    """

    def __enter__(self) -> "AnonymousPeak":
        self.before = self.peak = resident().anonymous
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            self.peak = max(self.peak, resident().anonymous)
            time.sleep(_POLL_SECONDS)


def cuda_peak(call: Callable[[], Any]) -> int:
    """Bytes torch's CUDA allocator held at most during a call, beyond those held before it."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
