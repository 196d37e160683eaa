"""The work of a sweep: its missing cells, and the folder through which processes share them."""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from diffquant.errors import DiffQuantError
from diffquant.evals.task import Task
from diffquant.sweep.cell import Cell
from diffquant.sweep.grid import Point

if TYPE_CHECKING:
    from diffquant.sweep.subject import Subject

# Inode and time of a file, which change when it is replaced.
_Stamp = tuple[int, int]


@dataclass(frozen=True)
class Job:
    """A cell to measure, as plain data: model, recipe and task."""

    subject: "Subject"
    point: Point
    task: Task
    cell: Cell

    @property
    def caption(self) -> str:
        return f"{self.point.model.name}, {self.point.label}, {self.task.name}"


@dataclass
class Work:
    """The cells that were missing when the sweep was planned, as plain data that can be pickled.

    Attributes:
        folder: folder of the cells.
        batches: the missing cells, grouped by the weights they need; a model's batches are consecutive.
        left: cells that were neither measured nor failed at this process's last look, by name.
    """

    folder: Path
    batches: Sequence[Sequence[Job]]
    left: dict[str, Job] = field(init=False)
    # Files found in place of missing cells: damaged cells, and failures of earlier runs.
    _before: Mapping[str, _Stamp] = field(init=False)
    _seen: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        self.left = {job.cell.name: job for job in self.jobs}
        files = [file for job in self.jobs for file in (job.cell.path, job.cell.failure_path)]
        self._before = {file.name: _stamp(file) for file in files if file.exists()}

    @property
    def jobs(self) -> list[Job]:
        """Every cell that was missing at the start."""
        return [job for batch in self.batches for job in batch]

    def apart(self) -> Self:
        """A copy for another process or thread."""
        other = copy(self)
        other.left = dict(self.left)
        return other

    def look(self) -> frozenset[str]:
        """List the folder and strike off finished cells; returns the names of its files.

        Raises:
            DiffQuantError: it cannot be read.
        """
        try:
            names = frozenset(os.listdir(self.folder))
        except OSError as error:
            raise DiffQuantError(
                f"{self.folder}, where the sweep's cells lie, cannot be read any more: {error.strerror}; "
                "when it is there again, run the same command to go on"
            ) from error
        # A damaged cell or failure may have been replaced by a file of the same name.
        for name in (names - self._seen) | (names & self._before.keys()):
            if name.endswith(".json") and self._is_new(name):
                self.left.pop(name.partition(".")[0], None)
        self._seen = names
        return names

    def is_settled(self, job: Job) -> bool:
        """Whether a cell was measured or failed since the sweep was planned."""
        return any(map(self._is_new, (job.cell.path.name, job.cell.failure_path.name)))

    def _is_new(self, name: str) -> bool:
        try:
            return _stamp(self.folder / name) != self._before.get(name)
        except FileNotFoundError:
            return False


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns
