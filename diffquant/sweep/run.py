"""Running a sweep: every missing cell is measured, and written as soon as it is."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from diffquant.errors import DiffQuantError
from diffquant.support.code import commit
from diffquant.support.files import write_atomically
from diffquant.support.plain_data import JsonObject, plain_digest
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions_of_run
from diffquant.sweep.addresses import cell_key, why_again
from diffquant.sweep.cell import Cell
from diffquant.sweep.claims import Claims, latest_claims
from diffquant.sweep.engines import Engine
from diffquant.sweep.engines.local import LocalEngine
from diffquant.sweep.exported import RuntimeOf, checkpoints_alone
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.plan import SweepPlan, plan_sweep
from diffquant.sweep.result import MeasuredCell, SweepResult
from diffquant.sweep.subject import weights_of
from diffquant.sweep.work import Batch, Job, Missing, Work
from diffquant.sweep.worker import Worker

_logger = logging.getLogger(__name__)


def run_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime_of: RuntimeOf = checkpoints_alone,
    engine: Engine | None = None,
) -> SweepResult:
    """Measure every cell that `output` does not hold yet.

    Args:
        models: checkpoints, and exported folders, each of which is one row, compared with the checkpoint
            it was made from where that is swept too.
        runtime_of: finds what opens an exported folder.
        engine: what has the cells measured; this process by default.

    A cell that fails is recorded and the rest goes on; `SweepResult.require_complete` tells. Interrupted,
    it loses the cell under way, and the same call goes on from there. Other sweeps may use `output` at the same time:
    a cell that they share is measured by one of them.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        OutputExistsError: `output` holds files of a sweep's names that no sweep wrote.
        DiffQuantError: `output` is gone, or no process is left that could measure the cells.
        KeyboardInterrupt: with a message that says how to go on.
    """
    sweep = _open_sweep(models, options, output, runtime_of)
    try:
        if sweep.work.batches:
            (engine or LocalEngine()).run(sweep.work, progress)
    except KeyboardInterrupt:
        raise sweep.interruption() from None
    return sweep.write_result()


def join_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime_of: RuntimeOf = checkpoints_alone,
) -> SweepResult | None:
    """Measure cells until others have claimed all that are left; who comes last writes sweep.json, tables and plots.

    It can be called any number of times at once, by any processes that see `output` and the models.

    Returns:
        All cells, for the last one; None for the others.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        DiffQuantError: `output` is gone.
        KeyboardInterrupt: with a message that says how to go on.
    """
    from diffquant.sweep.outputs import write_outputs

    sweep = _open_sweep(models, options, output, runtime_of)
    try:
        Worker(sweep.work, progress, start=random.random()).run(is_patient=False)
    except KeyboardInterrupt:
        raise sweep.interruption() from None
    missing = Missing(sweep.work)
    names = missing.look()
    if missing.jobs:
        return None
    tables = f"tables-{plain_digest([job.cell.name for job in sweep.jobs])[:16]}"
    with Claims(sweep.work.folder) as claims:
        claim = claims.take(tables, latest_claims(names))
        if claim is None:
            return None
        with claim:
            result = sweep.write_result()
            write_outputs(result, output)
    return result


@dataclass(frozen=True)
class _OpenSweep:
    """A sweep that is planned, with all of its cells and those that are missing."""

    plan: SweepPlan
    options: SweepOptions
    output: Path
    identities: dict[str, JsonObject]
    jobs: list[Job]
    work: Work

    def interruption(self) -> KeyboardInterrupt:
        """What an interruption says of how to go on."""
        missing = Missing(self.work)
        missing.look()
        done = len(self.jobs) - len(missing.jobs)
        return KeyboardInterrupt(
            f"interrupted: {done} of {len(self.jobs)} cells are done and kept in {self.work.folder}; "
            "run the same command again to go on"
        )

    def write_result(self) -> SweepResult:
        """Write sweep.json, and let go of what dead processes claimed."""
        names = self.work.look()
        Claims(self.work.folder).clear((job.cell.name for job in self.jobs), latest_claims(names))
        result = SweepResult([_read_cell(job) for job in self.jobs], self._settings())
        write_atomically(self.output / "sweep.json", result.to_json())
        return result

    def _settings(self) -> JsonObject:
        plan, options = self.plan, self.options
        return {
            "options": options.to_dict()
            | {"device": plan.setup.device, "batch_tokens": options.pass_tokens(plan.setup.device)},
            "tasks": list(self.identities.values()),
            "unseen": {task.name: unseen for task in plan.tasks if (unseen := task.unseen())},
            "models": {str(path): source.fingerprint for path, source in plan.sources.items()},
            "quantized": [str(path) for path, source in plan.sources.items() if source.packed or path.is_file()],
            "source_bytes": {str(path): source.checkpoint.stored_nbytes for path, source in plan.sources.items()},
            "dtype": plan.setup.dtype_name,
            "versions": versions_of_run(plan.setup.device),
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }


def _open_sweep(models: Sequence[Path], options: SweepOptions, output: Path, runtime_of: RuntimeOf) -> _OpenSweep:
    from diffquant.sweep.outputs import run_files

    run_files().check(output)
    plan = plan_sweep([Path(model) for model in models], options, runtime_of)
    folder = output / "cells"
    identities = {task.name: task.identity() for task in plan.tasks}
    jobs = [
        Job(point, task, Cell(folder, cell_key(plan.subjects[point.model], point.recipe, task, identities[task.name])))
        for point in plan.points
        for task in plan.tasks
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pending = [job for job in jobs if job.cell.read() is None]
    if pending and (why := why_again(folder, [job.cell.key for job in pending])):
        _logger.warning("%s; they are measured again", why)
    return _OpenSweep(plan, options, output, identities, jobs, Work.of(folder, _batches(pending, plan)))


def _batches(pending: Sequence[Job], plan: SweepPlan) -> list[Batch]:
    """Jobs of one model and one set of weights together; a model's batches follow each other, as its points do."""
    groups: dict[tuple[Path, str], list[Job]] = {}
    for job in pending:
        groups.setdefault((job.point.model, weights_of(job.point.recipe)), []).append(job)
    return [Batch(plan.subjects[model], tuple(jobs)) for (model, _), jobs in groups.items()]


def _read_cell(job: Job) -> MeasuredCell:
    measurement = job.cell.read()
    error = job.cell.read_failure() if measurement is None else None
    if measurement is None and error is None:
        # Another sweep measured what had failed, since it was looked at.
        measurement = job.cell.read()
    if measurement is None and error is None:
        raise DiffQuantError(f"{job.cell.path} is gone or damaged since it was written; run the same command again")
    return MeasuredCell(job.point, job.task.name, measurement, error, job.cell.key["code"])
