"""Engines: ways to run a sweep's missing cells, one file each."""

from collections.abc import Callable

from diffquant.support.progress import Progress
from diffquant.sweep.work import Work

Engine = Callable[[Work, Progress], None]
"""A function that has every cell of some work measured, or recorded as failed.

It starts workers, which share the cells by claims in their folder.

Raises:
    UsageError: what the engine needs is not there; before the first cell.
    DiffQuantError: the folder of the cells is gone, or no worker is left that could measure them.
"""
