"""The machine's processors, counted without torch, since programs that do not use torch ask too."""

import os


def cores() -> int:
    """The number of processor cores this process may use, where the system says so; else of all the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
