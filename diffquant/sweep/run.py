"""Running a sweep: every missing cell is measured, and written as soon as it is."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from diffquant.evals.task import Task
from diffquant.support.code import code_digest, commit
from diffquant.support.files import write_atomically
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions_of_run
from diffquant.sweep.cell import Cell
from diffquant.sweep.engines import Batch, Job, engine_named
from diffquant.sweep.exported import RuntimeOf, checkpoints_alone
from diffquant.sweep.grid import Point, SweepOptions
from diffquant.sweep.plan import SweepPlan, plan_sweep
from diffquant.sweep.recorder import CellRecorder
from diffquant.sweep.result import MeasuredCell, SweepResult
from diffquant.sweep.session import Subject, weights_of

# Changes with what a result holds, so that cells of an older form are measured again.
RESULT_FORMAT = 1

# A cell uses one task and one rounding; the code of the others is not its own.
_PICKED_BY_NAME = ("diffquant.evals.tasks", "diffquant.quantization.roundings")


def run_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime_of: RuntimeOf = checkpoints_alone,
    engine: str = "local",
) -> SweepResult:
    """Measure every cell that `output` does not hold yet.

    Args:
        models: checkpoints, and exported folders, each of which is one row, compared with the checkpoint
            it was made from where that is swept too.
        runtime_of: finds what opens an exported folder.
        engine: name of an engine in `diffquant.sweep.engines`, which runs the cells.

    A cell that fails is recorded and the rest goes on; `SweepResult.require_complete` tells. Interrupted,
    it loses the cell under way, and the same call goes on from there.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        KeyboardInterrupt: with a message that says how to go on.
    """
    plan = plan_sweep([Path(model) for model in models], options, runtime_of)
    runner = engine_named(engine)
    folder = output / "cells"
    identities = {task.name: task.identity() for task in plan.tasks}
    jobs = [
        Job(point, task, Cell(folder, _key(plan.subjects[point.model], point, task, identities[task.name])))
        for point in plan.points
        for task in plan.tasks
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pending = [job for job in jobs if job.cell.read() is None]
    recorder = CellRecorder(len(pending), progress)
    try:
        runner.run(_batches(pending, plan), recorder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: {len(jobs) - len(pending) + recorder.done_count} of {len(jobs)} cells are done and kept in "
            f"{folder}; run the same command again to go on"
        ) from None
    result = SweepResult([_read_cell(job) for job in jobs], _settings(plan, options, list(identities.values())))
    write_atomically(output / "sweep.json", result.to_json())
    return result


def _key(subject: Subject, point: Point, task: Task, identity: JsonObject) -> JsonObject:
    """All that a cell's result depends on."""
    modules = (*subject.modules(point.recipe), type(task).__module__)
    code = code_digest(modules, picking=_PICKED_BY_NAME)
    return subject.key(point.recipe) | {"format": RESULT_FORMAT, "task": identity, "code": code}


def _batches(pending: Sequence[Job], plan: SweepPlan) -> list[Batch]:
    """Jobs of one model and one set of weights together; a model's batches follow each other, as its points do."""
    groups: dict[tuple[Path, str], list[Job]] = {}
    for job in pending:
        groups.setdefault((job.point.model, weights_of(job.point.recipe)), []).append(job)
    return [Batch(plan.subjects[model], tuple(jobs)) for (model, _), jobs in groups.items()]


def _read_cell(job: Job) -> MeasuredCell:
    measurement = job.cell.read()
    error = job.cell.read_failure() if measurement is None else None
    return MeasuredCell(job.point, job.task.name, measurement, error, job.cell.key["code"])


def _settings(plan: SweepPlan, options: SweepOptions, tasks: list[JsonObject]) -> JsonObject:
    return {
        "options": options.to_dict()
        | {"device": plan.setup.device, "batch_tokens": options.pass_tokens(plan.setup.device)},
        "tasks": tasks,
        "models": {str(path): source.fingerprint for path, source in plan.sources.items()},
        "quantized": [str(path) for path, source in plan.sources.items() if source.packed or path.is_file()],
        "source_bytes": {str(path): source.checkpoint.stored_nbytes for path, source in plan.sources.items()},
        "dtype": plan.setup.dtype_name,
        "versions": versions_of_run(plan.setup.device),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
