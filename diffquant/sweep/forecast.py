"""List what a sweep would measure, and estimate how long it takes if cells in its folder tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from diffquant.support.durations import spoken
from diffquant.sweep.exported import RuntimeOf
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.plan import plan_sweep


@dataclass(frozen=True)
class SweepForecast:
    """The cells of a sweep.

    Attributes:
        held: number of cells that the folder holds already.
        missing: captions of those to measure, in their order.
        seconds: time that they take, by the mean of the held cells of the same model and task; None if some have
            none like them.
    """

    held: int
    missing: tuple[str, ...]
    seconds: float | None

    def __str__(self) -> str:
        held = f"; {self.held} are there already" if self.held else ""
        if not self.missing:
            return f"nothing to measure{held}"
        unknown = "; the first cell will tell how long one takes"
        time = unknown if self.seconds is None else f"; about {spoken(self.seconds)}, if none runs beside another"
        return "\n".join([f"{len(self.missing)} cells to measure{held}{time}", *(f"  {each}" for each in self.missing)])


def forecast(
    models: Sequence[Path], options: SweepOptions, output: Path, runtime_of: RuntimeOf | None = None
) -> SweepForecast:
    """Plan a sweep and look at what its folder holds; nothing is measured or written.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: whatever is wrong with models, options or data.
    """
    jobs = plan_sweep([Path(model) for model in models], options, runtime_of).jobs(output / "cells")
    held: dict[tuple[Path, str], list[float]] = {}
    missing = []
    for job in jobs:
        measurement = job.cell.read()
        if measurement is None:
            missing.append(job)
        else:
            held.setdefault((job.point.model, job.task.name), []).append(measurement.seconds)
    alike = [held.get((job.point.model, job.task.name)) for job in missing]
    known = [mean(seconds) for seconds in alike if seconds]
    return SweepForecast(
        len(jobs) - len(missing),
        tuple(job.caption for job in missing),
        sum(known) if len(known) == len(missing) else None,
    )
