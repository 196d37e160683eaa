"""A worker: measures the cells of a sweep that no other process has claimed. It imports no torch itself."""

import time
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from diffquant.support.progress import Progress
from diffquant.sweep.claims import Claim, Claims, latest_claims
from diffquant.sweep.measurement import Failure, Measurement
from diffquant.sweep.work import Job, Missing, Work

if TYPE_CHECKING:
    from diffquant.sweep.subject import Session

_SECONDS_BETWEEN_LOOKS = 0.5
# A cell whose worker died is tried once more.
_MOST_DEATHS = 2


class Worker:
    """A process's part of a sweep; it holds one set of weights at a time.

    It takes the cells of the weights that it holds first, then of a batch that nobody works on, then any: a model is
    read by another worker only where that would have nothing to do.
    """

    def __init__(self, work: Work, progress: Progress, start: float = 0.0, device: str | None = None) -> None:
        """Make ready; nothing is read or claimed yet.

        Args:
            start: share of the batches after which it begins, so that workers do not all want the same.
            device: device that computes, in place of the one that was planned; None for that.
        """
        self.work, self.device = work, device
        self._missing = Missing(work)
        self._batch_of = {job.cell.name: number for number, batch in enumerate(work.batches) for job in batch.jobs}
        self._at = int(start * len(work.batches))
        self._opened: tuple[int, Session] | None = None
        self._claims = Claims(work.folder)
        self._tell = _CellProgress(len(self._missing.jobs), progress)

    def run(self, is_patient: bool) -> None:
        """Measure cells until none is left, or, if not patient, until all that are left have holders that are alive.

        Raises:
            DiffQuantError: the folder of the cells is gone.
        """
        try:
            with self._claims:
                while (taken := self._next(is_patient)) is not None:
                    job, claim = taken
                    with claim:
                        job.cell.write(self._measured(job, claim.deaths))
                    self._tell.settled(job)
        except OSError:
            self.work.look()  # Says so where the folder is gone.
            raise

    def _next(self, is_patient: bool) -> tuple[Job, Claim] | None:
        while True:
            latest = latest_claims(self._missing.look())
            self._tell.left = len(self._missing.jobs)
            for job in self._candidates(latest):
                claim = self._claims.take(job.cell.name, latest)
                if claim is None:
                    continue
                if not self.work.is_settled(job):
                    return job, claim
                with claim:
                    pass  # Another settled it between the look and the claim.
            if not self._missing.jobs or not (is_patient or self._may_be_lost(latest)):
                return None
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _may_be_lost(self, latest: Mapping[str, int]) -> bool:
        """Whether a cell is left whose holder is not known to be alive."""
        return any(
            name not in latest or self._claims.life(name, latest[name]) != "alive" for name in self._missing.jobs
        )

    def _candidates(self, latest: Mapping[str, int]) -> Iterator[Job]:
        """The cells that are missing, those that are best for this worker first; it may find the last ones twice."""
        shared = {self._batch_of[name] for name in latest if name in self._batch_of}
        count = len(self.work.batches)
        order = [(self._at + number) % count for number in range(count)]
        held = [] if self._opened is None else [self._opened[0]]
        for number in (*held, *(n for n in order if n not in shared), *(n for n in order if n in shared)):
            for job in self.work.batches[number].jobs:
                if job.cell.name in self._missing.jobs and job.cell.name not in latest:
                    yield job
        yield from [job for name, job in self._missing.jobs.items() if name in latest]

    def _measured(self, job: Job, deaths: int) -> Measurement | Failure:
        if deaths >= _MOST_DEATHS:
            return Failure(f"the process that measured it died, {deaths} times; see what it wrote to stderr", "")
        return measure_job(self._session_of(job), job, self._tell.of(job))

    def _session_of(self, job: Job) -> "Session":
        self._at = self._batch_of[job.cell.name]
        subject = self.work.batches[self._at].subject
        if self._opened is not None and self.work.batches[self._opened[0]].subject is subject:
            session = self._opened[1]
        else:
            self._opened = None
            session = (subject if self.device is None else subject.on(self.device)).open()
        self._opened = (self._at, session)
        return session


def measure_job(session: "Session", job: Job, progress: Progress) -> Measurement | Failure:
    """Measure a job; whatever its error is, it must not end the other cells."""
    try:
        return session.measure(job.task, job.point.recipe, progress)
    except Exception as error:
        first_line = str(error).split("\n", 1)[0] or type(error).__name__
        return Failure(first_line, "".join(traceback.format_exception(error)))


class _CellProgress:
    """What is told as progress: the cells that are settled, and the share of the one under way.

    Attributes:
        left: number of cells that are still missing.
    """

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.left, self._progress = total, total, progress

    def of(self, job: Job) -> Progress:
        """Progress of the sweep while a job runs."""
        furthest = 0.0

        def tell(done: float, total: float, doing: str) -> None:
            nonlocal furthest
            # A cell counts as done when it is written; one that reads its reference first does not go back.
            furthest = max(furthest, min(done / total, 0.999) if total else 0.0)
            self._progress(self.total - self.left + furthest, self.total, f"{job.caption}: {doing}")

        return tell

    def settled(self, job: Job) -> None:
        """Tell that a cell was written."""
        self.left -= 1
        self._progress(self.total - self.left, self.total, job.caption)
