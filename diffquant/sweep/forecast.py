"""What a sweep would measure, and about how long it takes: by the cells that its folder holds, or by the work."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from diffquant.support.durations import spoken
from diffquant.support.speed import seconds_per_product
from diffquant.sweep.measurement import Measurement
from diffquant.sweep.subject import CheckpointSubject
from diffquant.sweep.work import Job

# Seconds of a cell over those of its products with the weights, where attention's logits or operands are rounded, and
# elsewhere: of a pocket model and of SmolLM2-135M they were 5 to 7, and 2 to 3.
_SIMULATED, _PLAIN = 6, 3


@dataclass(frozen=True)
class SweepForecast:
    """The cells of a sweep.

    Attributes:
        held: number of cells that the folder holds already.
        missing: captions of those to measure, in their order.
        seconds: time that they take: by the mean of the held cells of the same model and task, or by the products that
            they compute and the speed of this machine; None if some can be judged by neither.
    """

    held: int
    missing: tuple[str, ...]
    seconds: float | None

    @property
    def headline(self) -> str:
        """How many cells there are to measure, and about how long that takes."""
        held = f"; {self.held} {'is' if self.held == 1 else 'are'} there already" if self.held else ""
        if not self.missing:
            return f"nothing to measure{held}"
        unknown = "; the first cell will tell how long one takes"
        time = unknown if self.seconds is None else f"; about {spoken(self.seconds)}, if none runs beside another"
        cells = "1 cell" if len(self.missing) == 1 else f"{len(self.missing)} cells"
        return f"{cells} to measure{held}{time}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {each}" for each in self.missing)])


def forecast(cells: Sequence[tuple[Job, Measurement | None]]) -> SweepForecast:
    """How long a sweep's cells take that have no measurement yet, judged by the others and by the work."""
    held: dict[tuple[Path, str], list[float]] = {}
    missing = []
    for job, measurement in cells:
        if measurement is None:
            missing.append(job)
        else:
            held.setdefault((job.point.model, job.task.name), []).append(measurement.seconds)
    products, seconds = 0, 0.0
    is_known = True
    for job in missing:
        if alike := held.get((job.point.model, job.task.name)):
            seconds += mean(alike)
        elif work := _products(job):
            products += work
        else:
            is_known = False
    if products:
        seconds += products * seconds_per_product()
    captions = tuple(job.caption for job in missing)
    return SweepForecast(len(cells) - len(missing), captions, seconds if is_known else None)


def _products(job: Job) -> int | None:
    """Products with weights that take about as long as a cell; None on other devices, in other runtimes and tasks."""
    subject, tokens = job.subject, job.task.tokens
    if tokens is None or not isinstance(subject, CheckpointSubject) or subject.device != "cpu":
        return None
    recipe = job.point.recipe
    is_simulated = any(recipe.rounds_maps) or recipe.qk.quantizes or recipe.pv.quantizes
    return tokens * subject.source.weights * (_SIMULATED if is_simulated else _PLAIN)
