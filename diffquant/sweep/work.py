"""The work of a sweep: its missing cells, and the folder in which any number of processes share them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from diffquant.errors import DiffQuantError
from diffquant.evals.task import Task
from diffquant.sweep.cell import Cell
from diffquant.sweep.grid import Point

if TYPE_CHECKING:
    from diffquant.sweep.session import Subject

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

    def unsettled(self, jobs: Iterable[Job], names: frozenset[str]) -> list[Job]:
        """Those cells that were neither measured nor failed since the sweep was planned, by the folder's files."""
        return [job for job in jobs if not any(map(self._is_new, names.intersection(_files(job))))]

    def is_settled(self, job: Job) -> bool:
        """Whether a cell was measured, or failed, since the sweep was planned."""
        return any(map(self._is_new, _files(job)))

    def _is_new(self, name: str) -> bool:
        try:
            return _stamp(self.folder / name) != self.before.get(name)
        except FileNotFoundError:
            return False


def _files(job: Job) -> tuple[str, str]:
    """Names of the files that settle a cell."""
    return f"{job.cell.name}.json", f"{job.cell.name}.failed.json"


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns
