"""The work of a sweep: its missing cells, and the folder in which any number of processes share them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from diffquant.errors import DiffQuantError
from diffquant.evals.task import Task
from diffquant.sweep.cell import Cell
from diffquant.sweep.grid import Point

if TYPE_CHECKING:
    from diffquant.sweep.subject import Subject

# Inode and time of a file: another pair is another file.
_Stamp = tuple[int, int]


@dataclass(frozen=True)
class Job:
    """A cell to measure, as plain data."""

    point: Point
    task: Task
    cell: Cell

    @property
    def caption(self) -> str:
        return f"{self.point.model.name}, {self.point.label}, {self.task.name}"


@dataclass(frozen=True)
class Batch:
    """Cells that one set of a model's weights serves: plain data that can be sent elsewhere.

    Attributes:
        subject: model to measure; a checkpoint's `Source` travels as its path.
        jobs: one cell or more, of points with the same weights.
    """

    subject: "Subject"
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Work:
    """The cells that were missing when a sweep was planned: plain data that can be sent elsewhere.

    Attributes:
        folder: folder of the cells.
        batches: missing cells; the batches of one model follow each other.
        before: stamps of files that stood in a missing cell's place: damaged cells, and failures of earlier runs.
    """

    folder: Path
    batches: tuple[Batch, ...]
    before: Mapping[str, _Stamp]

    @classmethod
    def of(cls, folder: Path, batches: Sequence[Batch]) -> Self:
        """The work that is planned now."""
        cells = [job.cell for batch in batches for job in batch.jobs]
        files = [file for cell in cells for file in (cell.path, cell.failure_path)]
        return cls(folder, tuple(batches), {file.name: _stamp(file) for file in files if file.exists()})

    @property
    def jobs(self) -> list[Job]:
        """Every missing cell."""
        return [job for batch in self.batches for job in batch.jobs]

    def look(self) -> frozenset[str]:
        """The names of the files that are in the folder now.

        Raises:
            DiffQuantError: it cannot be read.
        """
        try:
            return frozenset(os.listdir(self.folder))
        except OSError as error:
            raise DiffQuantError(
                f"{self.folder}, where the sweep's cells lie, cannot be read any more: {error.strerror}; "
                "when it is there again, run the same command to go on"
            ) from error

    def is_settled(self, job: Job) -> bool:
        """Whether a cell was measured, or failed, since the sweep was planned."""
        return any(map(self.is_new, (job.cell.path.name, job.cell.failure_path.name)))

    def is_new(self, name: str) -> bool:
        """Whether a file of a cell was written since the sweep was planned."""
        try:
            return _stamp(self.folder / name) != self.before.get(name)
        except FileNotFoundError:
            return False


class Missing:
    """The cells of some work that are neither measured nor failed yet, as one look at their folder after another shows.

    Attributes:
        jobs: what is missing, by the cells' names.
    """

    def __init__(self, work: Work) -> None:
        self.jobs = {job.cell.name: job for job in work.jobs}
        self._work = work
        self._seen: frozenset[str] = frozenset()

    def look(self) -> frozenset[str]:
        """Look at the folder; returns the names of its files.

        Raises:
            DiffQuantError: it cannot be read.
        """
        names = self._work.look()
        # Files that stood in a cell's place may be replaced under their names.
        for name in (names - self._seen) | (names & self._work.before.keys()):
            cell = name.partition(".")[0]
            if name.endswith(".json") and cell in self.jobs and self._work.is_new(name):
                del self.jobs[cell]
        self._seen = names
        return names


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns
