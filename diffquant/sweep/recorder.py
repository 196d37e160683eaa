"""The recorder of a run: writes cells as they come, and tells how far the run is."""

from diffquant.support.progress import Progress
from diffquant.sweep.engines import Job
from diffquant.sweep.measurement import Failure, Measurement


class CellRecorder:
    """A recorder that writes cells, and tells as progress how many are done and the share of the one under way.

    Attributes:
        done_count: number of cells that were recorded.
    """

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self.progress = progress
        self.done_count = 0

    def progress_of(self, job: Job) -> Progress:
        """Progress of the run while a job runs."""
        furthest = 0.0

        def tell(done: float, total: float, doing: str) -> None:
            nonlocal furthest
            # A cell counts as done when it is written; one that reads its reference first does not go back.
            furthest = max(furthest, min(done / total, 0.999) if total else 0.0)
            self.progress(self.done_count + furthest, self.total, f"{_caption(job)}: {doing}")

        return tell

    def done(self, job: Job, outcome: Measurement | Failure) -> None:
        """Write a cell."""
        job.cell.write(outcome)
        self.done_count += 1
        self.progress(self.done_count, self.total, _caption(job))


def _caption(job: Job) -> str:
    return f"{job.point.model.name}, {job.point.label}, {job.task.name}"
