"""A worker: measures the cells of a sweep that no other process has claimed. No torch at the top."""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from diffquant.errors import DiffQuantError
from diffquant.support.progress import Progress, silent
from diffquant.sweep.claims import Claim, Claims, latest_claims
from diffquant.sweep.work import Job, Work

if TYPE_CHECKING:
    from diffquant.sweep.subject import Subject

_SECONDS_BETWEEN_LOOKS = 0.5
# A cell whose worker died is tried once more.
_MOST_DEATHS = 2


class Worker:
    """One process's part of a sweep, which can be pickled until it runs.

    It first takes cells for the weights that it holds, then a batch that nobody works on, then any cell: a second
    worker reads a model only when it has nothing else to do.
    """

    def __init__(self, work: Work, start: float = 0.0, device: str | None = None) -> None:
        """Set up; reads and claims nothing yet.

        Args:
            start: share of the batches to skip at first, so that workers begin in different places.
            device: device that computes, by default the planned one.
        """
        self.work, self.device = work.apart(), device
        self._at = int(start * len(work.batches))
        self._batch_of = {job.cell.name: number for number, batch in enumerate(work.batches) for job in batch}
        # The last model as planned, and this worker's own copy of it.
        self._held: tuple[Subject, Subject] | None = None

    def run(self, progress: Progress = silent, is_patient: bool = True) -> None:
        """Measure cells until none is left, or, if not patient, until live processes hold all the rest.

        Raises:
            DiffQuantError: the folder of the cells is gone.
        """
        total = len(self.work.left)
        try:
            with Claims(self.work.folder) as claims:
                while (taken := self._next(claims, is_patient)) is not None:
                    job, claim = taken
                    done = total - len(self.work.left)
                    shown = _within(progress, done, total, job.caption)
                    # No error of one cell may stop the others.
                    with claim, job.cell.settled() as measured:
                        shown(0, 1, "loading")
                        subject = self._subject_of(job, claim.deaths)
                        reference = subject.reference(job.task, job.point.recipe, shown)
                        measured.append(subject.measure(job.task, job.point.recipe, reference, shown))
                    progress(done + 1, total, job.caption)
        except OSError:
            self.work.look()  # Raises if the folder is gone.
            raise

    def _next(self, claims: Claims, is_patient: bool) -> tuple[Job, Claim] | None:
        work = self.work
        while True:
            latest = latest_claims(work.look())
            for job in self._candidates(latest):
                claim = claims.take(job.cell.name, latest)
                if claim is None:
                    continue
                if not work.is_settled(job):
                    return job, claim
                with claim:
                    pass  # Another process finished it between the look and the claim.
            # A claim's holder may turn out to be dead.
            may_be_lost = any(name not in latest or claims.life(name, latest[name]) != "alive" for name in work.left)
            if not work.left or not (is_patient or may_be_lost):
                return None
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _candidates(self, latest: Mapping[str, int]) -> Iterator[Job]:
        """The missing cells, best for this worker first; the last ones may come twice."""
        batches, left = self.work.batches, self.work.left
        shared = {self._batch_of[name] for name in latest if name in self._batch_of}
        order = [(self._at + number) % len(batches) for number in range(len(batches))]
        held = [] if self._held is None else [self._at]
        for number in (*held, *(n for n in order if n not in shared), *(n for n in order if n in shared)):
            for job in batches[number]:
                if job.cell.name in left and job.cell.name not in latest:
                    yield job
        yield from [job for name, job in left.items() if name in latest]

    def _subject_of(self, job: Job, deaths: int) -> "Subject":
        """This worker's copy of a cell's model; frees the previous one if it is another.

        Raises:
            DiffQuantError: too many processes have died measuring this cell.
        """
        if deaths >= _MOST_DEATHS:
            raise DiffQuantError(f"the process that measured it died, {deaths} times; see what it wrote to stderr")
        self._at = self._batch_of[job.cell.name]
        if self._held is None or self._held[0] is not job.subject:
            self._held = None  # Memory may hold only one model.
            self._held = job.subject, job.subject.apart(self.device)
        return self._held[1]


def _within(progress: Progress, before: int, cells: int, caption: str) -> Progress:
    """Progress of a sweep while one of its cells runs."""
    furthest = 0.0

    def tell(done: float, total: float, doing: str) -> None:
        nonlocal furthest
        # A cell counts as done when it is written. Its progress never goes back after computing the reference.
        furthest = max(furthest, min(done / total, 0.999) if total else 0.0)
        progress(before + furthest, cells, f"{caption}: {doing}")

    return tell
