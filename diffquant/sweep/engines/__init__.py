"""Engines, which have a sweep's missing cells measured: one file each."""

from typing import Protocol

from diffquant.support.progress import Progress
from diffquant.sweep.work import Work


class Engine(Protocol):
    """A way to have cells measured: it starts workers, which share the cells by claims in their folder."""

    def run(self, work: Work, progress: Progress) -> None:
        """Have every cell measured, or recorded as failed.

        Raises:
            UsageError: what the engine needs is not there; before the first cell.
            DiffQuantError: the folder of the cells is gone, or no worker is left that could measure them.
        """
