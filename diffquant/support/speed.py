"""How fast this machine computes now, by which work is judged before it starts."""

import time
from collections.abc import Callable

import torch

# Rows and columns of what is timed: some milliseconds.
_ROWS, _WIDTH = 64, 1024


def seconds_per_product() -> float:
    """Seconds that one weight's product with one token takes in a product of float32 matrices, on all threads."""
    x, matrix = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    return quickest(lambda: x @ matrix) / (x.numel() * _WIDTH)


def quickest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls: what else the machine does is no part of the work."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
