"""The machine's processors and memory, counted without torch, since programs that do not use torch ask too."""

import os
from pathlib import Path


def cores() -> int:
    """The number of processor cores this process may use, where the system says so; else of all the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """The number of threads that a process computes with: what OMP_NUM_THREADS says, else one per core."""
    import psutil

    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() else min(cores(), psutil.cpu_count(logical=False) or cores())


def free_memory() -> int:
    """Bytes of main memory that this process can still have: the machine's, or its control group's if that is less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_free_in_groups()])


def _free_in_groups() -> list[int]:
    """Bytes that are free in each control group above this process, where Linux and schedulers set limits."""
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
                free += _free_in(folder / limit, folder / "memory.stat", used)
    return free


def _free_in(limit: Path, statistics: Path, used: str) -> list[int]:
    """A group's limit less what its processes hold, files in memory left aside; nothing where there is no limit."""
    try:
        held = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
        return [max(0, int(limit.read_text(encoding="ascii")) - int(held[used]))]
    except (OSError, ValueError, KeyError):
        return []
