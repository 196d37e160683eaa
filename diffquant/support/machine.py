"""What the machine has, without torch: programs that do not use it ask, too."""

import os


def cores() -> int:
    """Processor cores this process may use, where the system says which; else those the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
