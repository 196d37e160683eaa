"""The command line that the fuzzers share: so many seeds from one on, and what came of each kind of input."""

import argparse
import resource
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

_MEMORY = 2 << 30

# A folder to work in and the seeds to try -> how many of each kind came to what, and a line for each that went wrong.
Attempt = Callable[[Path, range], tuple[dict[str, Counter[str]], list[str]]]


def run(description: str, attempt: Attempt) -> int:
    """Try the seeds of the command line and print what came of them.

    Returns:
        Exit status: 1 where anything went wrong or took more than 2 GiB of memory.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = attempt(Path(folder), range(arguments.first, arguments.first + arguments.count))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    for name, verdicts in counts.items():
        print(f"{name}: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}")
    peak = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{sum(sum(c.values()) for c in counts.values())} in all, {len(wrong)} wrong; peak {peak >> 20} MiB")
    return 1 if wrong or peak > _MEMORY else 0
