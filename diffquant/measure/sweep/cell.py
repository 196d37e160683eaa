"""A planned sweep, and the worker that measures its cells. No torch at the top."""

import os
import socket
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from diffquant.errors import CheckpointError, DiffQuantError
from diffquant.measure.cells import Cell
from diffquant.measure.task import Task
from diffquant.recipe import Recipe
from diffquant.support.files import set_folder_aside
from diffquant.support.installation import result_version_digest
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, report_nothing

if TYPE_CHECKING:
    from diffquant.measure.sweep.exported import Subject

# Raise it when results get new fields, so that older cells are measured again.
RESULT_FORMAT = 1


@dataclass(frozen=True)
class Run:
    """A planned sweep. It can be pickled.

    Attributes:
        cells: cells to measure, in order.
        subjects: models by path.
        tasks: tasks by name.
    """

    cells: Sequence[Cell]
    subjects: Mapping[Path, "Subject"]
    tasks: Mapping[str, Task]

    def subject_of(self, cell: Cell) -> "Subject":
        return self.subjects[cell.point.model]


def cell_key(subject: "Subject", recipe: Recipe, task: Task, identity: JsonObject) -> JsonObject:
    """Collect everything that a cell's result depends on, as plain data.

    Args:
        identity: result of `task.identity`, passed in because computing it may read a text.
    """
    code = result_version_digest((__name__, *subject.python_modules(recipe), type(task).__module__))
    return subject.key(recipe) | {"format": RESULT_FORMAT, "task": identity, "code": code}


def check_same_environment(run: Run) -> None:
    """Check that this process has the models, code and versions with which a run's cells were planned.

    Raises:
        CheckpointError: a model, the code or a version differs; the message lists all differences.
    """
    # Cells with the same weights differ in the same entries.
    one_each = {cell.weights_key: cell for cell in run.cells}.values()
    differing = {name for cell in one_each for name in _differences(run, cell)}
    if differing:
        raise CheckpointError(
            f"{socket.gethostname()} cannot measure the cells as planned, because {', '.join(sorted(differing))} "
            "differ there; install the same versions, and use the same kind of device"
        )


def _differences(run: Run, cell: Cell) -> list[str]:
    planned = cell.key
    here = cell_key(run.subject_of(cell), cell.point.recipe, run.tasks[cell.task], planned["task"])
    return [name for name in here | planned if here.get(name) != planned.get(name)]


_SECONDS_BETWEEN_LOOKS = 0.5
_NO_LOCKS_THERE = (ENOSYS, ENOLCK, ENOTSUP, EOPNOTSUPP)


class Worker:
    """Measures cells in one process, with one model in memory at a time."""

    def __init__(self, run: Run, device: str | None = None) -> None:
        """Set up without reading a model.

        Args:
            device: device that computes, by default the planned one.
        """
        self.run, self.device = run, device
        # The current model as planned, and this worker's copy of it.
        self._held: tuple[Subject, Subject] | None = None

    def measure(self, number: int, is_patient: bool = False, progress: Progress = report_nothing) -> bool:
        """Measure a cell and write its result, or its error.

        Args:
            number: index of the cell in the run.
            is_patient: whether to wait for a cell that another sweep is measuring.

        Returns:
            Whether the cell has a result or a recorded error; False if another sweep is measuring it.

        Raises:
            DiffQuantError: the folder of the cells is gone.
            OSError: the folder cannot be written.
        """
        cell = self.run.cells[number]
        try:
            with _lock(cell, is_patient) as is_held:
                # Another sweep may have measured it since it was planned.
                if is_held and cell.read() is None:
                    self._measure(cell, progress)
                return is_held
        except OSError:
            check_cells_folder(cell.folder)
            raise

    def _measure(self, cell: Cell, progress: Progress) -> None:
        try:
            progress(0, 1, "loading")
            planned, task, recipe = self.run.subject_of(cell), self.run.tasks[cell.task], cell.point.recipe
            if self._held is None or self._held[0] is not planned:
                self._held = None  # Memory may hold only one model.
                self._held = planned, planned.copy_to(self.device)
            subject = self._held[1]
            result = subject.measure(task, recipe, subject.compute_reference(task, recipe, progress), progress)
        except Exception as error:  # No error of one cell may stop the others.
            first_line = str(error).split("\n", 1)[0] or type(error).__name__
            cell.write_failure(first_line, "".join(traceback.format_exception(error)).splitlines())
        else:
            cell.write(result)


def measure_all(run: Run, progress: Progress = report_nothing, device: str | None = None) -> None:
    """Measure a run's cells in this process; cells that other sweeps are measuring come last.

    Args:
        device: device to use; by default the one that the run was planned with.

    Raises:
        DiffQuantError: the folder of the cells is gone.
    """
    worker, cells, done = Worker(run, device), run.cells, 0
    left = list(range(len(cells)))
    for is_patient in (False, True):
        held = []
        for number in left:
            within = make_cell_progress(progress, done, len(cells), cells[number].caption)
            if worker.measure(number, is_patient, within):
                done += 1
                progress(done, len(cells), cells[number].caption)
            else:
                held.append(number)
        left = held


def check_cells_folder(folder: Path) -> None:
    """Check that the folder of a sweep's cells can be read.

    Raises:
        DiffQuantError: the folder cannot be read.
    """
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise DiffQuantError(
            f"the sweep's folder {folder} can no longer be read: {error.strerror}; "
            "when it is available again, run the same command to resume"
        ) from error


def remove_locks(cells: Iterable[Cell]) -> None:
    """Remove the lock files that killed workers left."""
    for cell in cells:
        if cell.lock_path.exists():
            with _lock(cell, is_patient=False):
                pass


@contextmanager
def _lock(cell: Cell, is_patient: bool) -> Iterator[bool]:
    """Lock a cell and yield whether that succeeded. The system releases the lock of a process that dies."""
    # filelock would create a removed folder again.
    check_cells_folder(cell.folder)
    set_folder_aside(cell.lock_path)
    if cell.lock_path.is_symlink():
        cell.lock_path.unlink(missing_ok=True)
    # filelock's fallback, a file that merely exists, would lock a cell forever if its worker is killed.
    lock = FileLock(cell.lock_path, blocking=is_patient, poll_interval=_SECONDS_BETWEEN_LOOKS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        # Without file locks two sweeps may measure the same cell; both write the same result.
        if error.errno not in _NO_LOCKS_THERE:
            raise
    try:
        yield True
    finally:
        # Remove the file before releasing it, so that nobody locks a removed file. Windows cannot remove an open file.
        with suppress(PermissionError):
            cell.lock_path.unlink(missing_ok=True)
        lock.release()


def make_cell_progress(progress: Progress, before: int, cells: int, caption: str) -> Progress:
    """Return a callback that reports the progress of one cell as progress of the sweep.

    Args:
        before: number of the sweep's cells that are done already.
        cells: number of cells in the sweep.
        caption: description of the cell, shown with its progress.
    """
    furthest = 0.0

    def on_progress(done: float, total: float, doing: str) -> None:
        nonlocal furthest
        # A cell counts as done when it is written. Its progress never goes back after computing the reference.
        furthest = max(furthest, min(done / total, 0.999) if total else 0.0)
        progress(before + furthest, cells, f"{caption}: {doing}")

    return on_progress
