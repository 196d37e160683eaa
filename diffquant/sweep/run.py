"""Runs a sweep: measures every missing cell and writes it at once."""

import logging
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from diffquant.errors import DiffQuantError
from diffquant.support.code import commit
from diffquant.support.files import write_atomically
from diffquant.support.plain_data import JsonObject, plain_digest
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions_of_run
from diffquant.sweep.addresses import why_again
from diffquant.sweep.claims import Claims, latest_claims
from diffquant.sweep.engines import Engine
from diffquant.sweep.exported import RuntimeOf
from diffquant.sweep.forecast import SweepForecast, forecast
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.plan import SweepPlan, plan_sweep
from diffquant.sweep.result import MeasuredCell, SweepResult
from diffquant.sweep.subject import weights_of
from diffquant.sweep.work import Job, Work
from diffquant.sweep.worker import Worker

_logger = logging.getLogger(__name__)


def run_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime_of: RuntimeOf | None = None,
    engine: Engine | None = None,
    planned: Callable[[SweepForecast], None] | None = None,
) -> SweepResult:
    """Measure every cell that `output` does not hold yet.

    Args:
        models: checkpoints and exported folders. A folder is one row, compared with the checkpoint it was made
            from if that is in the sweep.
        runtime_of: finds the runtime for an exported folder; not needed for checkpoints.
        engine: runs the cells; by default this process does.
        planned: called with the cells to measure before anything is written; what it raises ends the sweep.

    A cell that fails is recorded and the rest goes on; `SweepResult.require_complete` raises for it. An interrupt loses
    only the cell under way: the same call resumes from there. Other sweeps may use `output` at the same time: one of
    them measures a cell that they share.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        OutputExistsError: `output` holds files with a sweep's file names that no sweep wrote.
        DiffQuantError: `output` is gone, or no process is left to measure the cells.
        KeyboardInterrupt: with a message that says how to go on.
    """
    plan, jobs, work = _open(models, options, output, runtime_of, planned)
    try:
        if work.batches and engine:
            engine(work, progress)
        elif work.batches:
            Worker(work).run(progress)
    except KeyboardInterrupt:
        raise _interruption(work, len(jobs)) from None
    return _write_result(plan, jobs, output)


def join_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime_of: RuntimeOf | None = None,
    planned: Callable[[SweepForecast], None] | None = None,
) -> SweepResult | None:
    """Measure cells until other processes have claimed the rest; the last one writes sweep.json, tables and plots.

    Any number of processes that see `output` and the models can call it at once.

    Returns:
        All cells in the last process, None in the others.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        DiffQuantError: `output` is gone.
        KeyboardInterrupt: with a message that says how to go on.
    """
    from diffquant.sweep.outputs import write_outputs

    plan, jobs, work = _open(models, options, output, runtime_of, planned)
    try:
        Worker(work, start=random.random()).run(progress, is_patient=False)
    except KeyboardInterrupt:
        raise _interruption(work, len(jobs)) from None
    names = work.look()
    if work.left:
        return None
    tables = f"tables-{plain_digest([job.cell.name for job in jobs])[:16]}"
    with Claims(work.folder) as claims:
        claim = claims.take(tables, latest_claims(names))
        if claim is None:
            return None
        with claim:
            result = _write_result(plan, jobs, output)
            write_outputs(result, output)
    return result


def _open(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    runtime_of: RuntimeOf | None,
    planned: Callable[[SweepForecast], None] | None,
) -> tuple[SweepPlan, list[Job], Work]:
    """A sweep's plan, all of its cells, and the missing ones as work."""
    from diffquant.sweep.outputs import run_files

    run_files().check(output)
    plan = plan_sweep([Path(model) for model in models], options, runtime_of)
    folder = output / "cells"
    jobs = plan.jobs(folder)
    cells = [(job, job.cell.read()) for job in jobs]
    if planned is not None:
        planned(forecast(cells))
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job, measurement in cells if measurement is None]
    if missing and (why := why_again(folder, [job.cell.key for job in missing])):
        _logger.warning("%s; they are measured again", why)
    # A model's points are consecutive, so its batches are too.
    batches: dict[tuple[Path, str], list[Job]] = {}
    for job in missing:
        batches.setdefault((job.point.model, weights_of(job.point.recipe)), []).append(job)
    return plan, jobs, Work(folder, list(batches.values()))


def _interruption(work: Work, cells: int) -> KeyboardInterrupt:
    """A KeyboardInterrupt whose message says how to go on."""
    work.look()
    return KeyboardInterrupt(
        f"interrupted: {cells - len(work.left)} of {cells} cells are done and kept in {work.folder}; "
        "run the same command again to go on"
    )


def _write_result(plan: SweepPlan, jobs: Sequence[Job], output: Path) -> SweepResult:
    """Write sweep.json, and remove the claims of dead processes."""
    folder = output / "cells"
    latest = latest_claims(Work(folder, ()).look())
    Claims(folder).clear((job.cell.name for job in jobs), latest)
    result = SweepResult([_read_cell(job) for job in jobs], _settings(plan, jobs))
    write_atomically(output / "sweep.json", result.to_json())
    return result


def _settings(plan: SweepPlan, jobs: Sequence[Job]) -> JsonObject:
    options, setup = plan.options, plan.setup
    return {
        "options": options.to_dict() | {"device": setup.device, "batch_tokens": options.pass_tokens(setup.device)},
        "tasks": list({job.task.name: job.cell.key["task"] for job in jobs}.values()),
        "unseen": {task.name: unseen for task in plan.tasks if (unseen := task.unseen())},
        "models": {str(path): source.fingerprint for path, source in plan.sources.items()},
        "quantized": [str(path) for path, source in plan.sources.items() if source.packed or path.is_file()],
        "source_bytes": {str(path): source.checkpoint.stored_nbytes for path, source in plan.sources.items()},
        # An exported model computes in the dtype it was exported with.
        "dtype": setup.dtype_name if plan.sources else None,
        "versions": versions_of_run(setup.device),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _read_cell(job: Job) -> MeasuredCell:
    measurement = job.cell.read()
    error = job.cell.read_failure() if measurement is None else None
    if measurement is None and error is None:
        # Another sweep has measured the failed cell in the meantime.
        measurement = job.cell.read()
    if measurement is None and error is None:
        raise DiffQuantError(f"{job.cell.path} is gone or damaged since it was written; run the same command again")
    return MeasuredCell(job.point, job.task.name, measurement, error, job.cell.key["code"])
