"""The machine's processors and memory, without torch, since programs that do not use torch ask too."""

import os
from pathlib import Path


def cores() -> int:
    """The number of CPU cores this process may use, or all of the machine's if the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """The number of threads that a process computes with: OMP_NUM_THREADS, or one per core."""
    import psutil

    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() else min(cores(), psutil.cpu_count(logical=False) or cores())


def free_memory() -> int:
    """Bytes of memory that this process can still use: those of the machine, or of its control group if less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_free_in_groups()])


def _free_in_groups() -> list[int]:
    """Free bytes in each control group of this process, through which Linux and schedulers set limits."""
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
    """A group's limit minus the memory of its processes, without cached files; empty if there is no limit."""
    try:
        held = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
        return [max(0, int(limit.read_text(encoding="ascii")) - int(held[used]))]
    except (OSError, ValueError, KeyError):
        return []
