"""Memory of processes as Linux counts it, and of a CUDA device as torch's allocator does."""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.01
# Large beside what Linux may leave out of a peak.
_KNOWN = 1 << 22
# glibc's number for the size from which a block has pages of its own; half a page, so that hardly any block shares one.
_MMAP_THRESHOLD, _OWN_PAGES_FROM = -3, 2048


def resident(process: int | str = "self") -> tuple[int, int]:
    """Memory of a process, in bytes; zeros where it has ended and its memory is released.

    Returns:
        The largest resident set so far, mapped files included; the resident set now, without mapped files.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return status_bytes(status, "VmHWM"), status_bytes(status, "RssAnon")


def status_bytes(status: str, name: str) -> int:
    """Bytes that a line of /proc/PID/status gives; 0 where the line is absent."""
    values = (line.split()[1] for line in status.splitlines() if line.startswith(name + ":"))
    return 1024 * int(next(values, "0"))


def give_blocks_pages() -> None:
    """Give each block of memory that this process asks for from now on pages of its own, gone once it is freed.

    Otherwise malloc keeps what is freed for the next that asks, whose memory then shows in no count of pages.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _OWN_PAGES_FROM)


def cpu_peak(call: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory grew at most during a call, what it returns included.

    For a process that began with `give_blocks_pages`. Linux counts pages to within a quarter of a megabyte.

    Raises:
        OSError: this is not Linux.
    """
    ctypes.CDLL(None).malloc_trim(0)
    # Linux counts VmRSS exactly, but the peak without each core's latest pages. So what was there before is read off a
    # peak, too: that of a block of known size.
    _forget_peak()
    _fill_pages(_KNOWN)
    before = resident()[0] - _KNOWN
    _forget_peak()
    held = call()
    grown = resident()[0] - before
    del held
    return grown


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _fill_pages(nbytes: int) -> None:
    """Touch this many bytes of new pages, and give them back."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages[:: mmap.PAGESIZE] = b"1" * (nbytes // mmap.PAGESIZE)


class AnonymousPeak:
    """Watches the anonymous memory of this process while a block runs.

    Attributes:
        before: anonymous bytes when the block began.
        peak: largest number of anonymous bytes seen.
    """

    def __enter__(self) -> "AnonymousPeak":
        _, self.before = resident()
        self.peak = self.before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            _, anonymous = resident()
            self.peak = max(self.peak, anonymous)
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
