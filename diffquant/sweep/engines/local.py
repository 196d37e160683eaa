"""The engine of this process: one cell after another."""

import traceback
from collections.abc import Sequence

from diffquant.support.progress import Progress
from diffquant.sweep.engines import Batch, Job, Recorder, register
from diffquant.sweep.measurement import Failure, Measurement
from diffquant.sweep.session import Session, Subject


class LocalEngine:
    """An engine that runs batches in their order; those of one model follow each other and share its session."""

    def run(self, batches: Sequence[Batch], recorder: Recorder) -> None:
        subject: Subject | None = None
        session: Session | None = None
        for batch in batches:
            if session is None or batch.subject is not subject:
                subject, session = batch.subject, batch.subject.open()
            for job in batch.jobs:
                recorder.done(job, measure_job(session, job, recorder.progress_of(job)))


def measure_job(session: Session, job: Job, progress: Progress) -> Measurement | Failure:
    """Measure a job; whatever its error is, it must not end the other cells."""
    try:
        return session.measure(job.task, job.point.recipe, progress)
    except Exception as error:
        first_line = str(error).split("\n", 1)[0] or type(error).__name__
        return Failure(first_line, "".join(traceback.format_exception(error)))


register("local", LocalEngine)
