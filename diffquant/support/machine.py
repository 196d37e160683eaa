"""Reports CPU cores and memory, and sets up threads and the allocator, without importing torch."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def cores() -> int:
    """Return the number of CPU cores this process may use, or all if the system does not report it."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def use_torch_defaults() -> Iterator[None]:
    """Run with torch's own default dtype and device and without autocast, whatever the caller's program has set."""
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
            # Within torch.device each operation is slower, so it is entered only if it changes something.
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def threads() -> int:
    """Return the number of threads that a process computes with: OMP_NUM_THREADS, or one per core."""
    import psutil

    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() else min(cores(), psutil.cpu_count(logical=False) or cores())


def available_memory() -> int:
    """Return the bytes of memory that this process can still use, within its control group's limit."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_free_in_groups()])


def _free_in_groups() -> list[int]:
    """Return the free bytes in each control group of this process, whose limits Linux and schedulers set."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    free = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup", controllers)
        limit, used = ("memory.limit_in_bytes", "total_rss") if controllers else ("memory.max", "anon")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                free += _free_bytes(folder / limit, folder / "memory.stat", used)
    return free


def _free_bytes(limit: Path, statistics: Path, used: str) -> list[int]:
    """Return a group's limit minus the memory of its processes, without cached files; [] without a limit."""
    try:
        held = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
        return [max(0, int(limit.read_text(encoding="ascii")) - int(held[used]))]
    except (OSError, ValueError, KeyError):
        return []


# Spinning takes tens of microseconds, about as long as sleeping and waking.
_TURNS = "10000"


def limit_spinning() -> None:
    """Make the threads of this process and its children sleep soon after a matrix product instead of spinning.

    GNU's OpenMP otherwise spins for milliseconds, which slows computation down if other programs need the cores.
    Variables that are set already are not changed, and a process that has loaded torch is not affected.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = _TURNS


# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 2**30
# The largest thresholds that glibc sets itself as larger blocks are freed.
_USUAL_MMAP, _USUAL_TRIM = 2**25, 2**26


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep up to a gigabyte of freed memory for the next tensors inside this context.

    When the context exits, this memory is returned to the system. Without the context, the kernel clears and maps every
    large tensor page by page, which takes a seventh of the CPU seconds of `verify`. Without glibc nothing changes.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        yield
        return
    # Older versions accept no threshold above the usual one.
    if not library.mallopt(_MMAP_THRESHOLD, _KEPT):
        library.mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _USUAL_MMAP)
        library.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM)
        library.malloc_trim(0)
