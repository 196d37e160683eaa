"""The registry of engines, which run a sweep's missing cells: one file each, which registers itself."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

from diffquant.errors import UsageError
from diffquant.evals.task import Task
from diffquant.support.discovery import import_all
from diffquant.support.progress import Progress
from diffquant.sweep.cell import Cell
from diffquant.sweep.grid import Point
from diffquant.sweep.measurement import Failure, Measurement
from diffquant.sweep.session import Subject


@dataclass(frozen=True)
class Job:
    """A cell to measure, as plain data."""

    point: Point
    task: Task
    cell: Cell


@dataclass(frozen=True)
class Batch:
    """Cells that one set of a model's weights serves: plain data that can be sent elsewhere.

    Attributes:
        subject: model to measure; a checkpoint's `Source` travels as its path.
        jobs: one cell or more, of points with the same weights.
    """

    subject: Subject
    jobs: tuple[Job, ...]


class Recorder(Protocol):
    """The listener that an engine tells what it does."""

    def progress_of(self, job: Job) -> Progress:
        """The function to which a job reports its progress."""

    def done(self, job: Job, outcome: Measurement | Failure) -> None:
        """Keep a job's outcome; called once a job, in any order, from the thread that runs the engine."""


class Engine(Protocol):
    """A way to run batches of cells."""

    def run(self, batches: Sequence[Batch], recorder: Recorder) -> None:
        """Measure every job; one that fails has a `Failure` recorded, and the others go on."""


_ENGINES: dict[str, type[Engine]] = {}

_Engine = TypeVar("_Engine", bound=type[Engine])


def register(name: str, engine: _Engine) -> _Engine:
    """Make an engine known under a name.

    Raises:
        ValueError: the name is taken.
    """
    if name in _ENGINES:
        raise ValueError(f"engine {name!r} is registered twice")
    _ENGINES[name] = engine
    return engine


def engine_named(name: str) -> Engine:
    """A new engine of the kind registered under a name.

    Raises:
        UsageError: there is none of that name.
    """
    _import_engines()
    if name not in _ENGINES:
        raise UsageError(f"unknown engine {name!r}; known are {', '.join(_ENGINES)}")
    return _ENGINES[name]()


@cache
def _import_engines() -> None:
    import_all(sys.modules[__name__])
