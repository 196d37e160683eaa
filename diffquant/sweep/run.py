"""The engine: every missing cell, each written as soon as it is measured."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diffquant.attention import check_backend
from diffquant.errors import CheckpointError, UsageError
from diffquant.loading import check_loadable
from diffquant.quantization.roundings import text_identity
from diffquant.scheme import LAYER_TARGETS
from diffquant.source.ranges import check_taken, read_any_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import check_device, resolve
from diffquant.support.files import file_digest, write_atomically
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions_of_run
from diffquant.sweep.cell import Cell
from diffquant.sweep.exported import ExportedModel, ExportedSession, Runtime, check_as_it_is, describe, exported_points
from diffquant.sweep.grid import Point, SweepOptions, points
from diffquant.sweep.result import Measured, SweepResult
from diffquant.sweep.session import Session
from diffquant.sweep.tasks import Task, make_tasks

# Changes with what a result holds, so that cells of an older form are measured again.
RESULT_FORMAT = 1


def run_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = silent,
    runtime: Runtime | None = None,
) -> SweepResult:
    """Measure every cell that `output` does not hold yet.

    Args:
        models: checkpoints, and exported folders, each of which is one row, compared with the checkpoint
            it was made from where that is swept too.
        runtime: runs exported folders.

    A cell that fails is recorded and the rest goes on; `SweepResult.require_complete` tells. Interrupted,
    it loses the cell under way, and the same call goes on from there.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: what can be known before the first cell.
        KeyboardInterrupt: with a message that says how to go on.
    """
    paths = [Path(model) for model in models]
    exported = describe(paths, runtime)
    checkpoints = [path for path in paths if path not in exported]
    if not checkpoints and exported:
        check_as_it_is(options)
    grid = points(checkpoints, options) if checkpoints or not exported else []
    tasks = make_tasks(options)
    check_device(options.device)
    check_backend(options.attention, (scheme for point in grid for scheme in point.recipe.schemes_of("logits")))
    sources = {model: open_source(model) for model in checkpoints}
    for model, source in sources.items():
        check_loadable(source, [point.recipe for point in grid if point.model == model])
    sweep = _Sweep(options, tasks, sources, _scales_by_model(sources, options.scales), exported)
    for point in grid:
        _check_scales(point, sweep.scales.get(point.model))
    for model, file in sweep.scales.items():
        check_taken(file, [point.recipe for point in grid if point.model == model])
    grid += exported_points(exported, sources)
    folder = output / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [_Job(point, task, Cell(folder, sweep.key(point, task))) for point in grid for task in sweep.tasks]
    pending = [job for job in jobs if job.cell.read() is None]
    counter = _Counter(len(pending), progress)
    try:
        for model in dict.fromkeys(job.point.model for job in pending):
            of_model = _by_weights([job for job in pending if job.point.model == model])
            session = _session(sweep, of_model[0].point, runtime)
            for job in of_model:
                _measure(job, session, counter)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: {len(jobs) - len(pending) + counter.done} of {len(jobs)} cells are done and kept in "
            f"{folder}; run the same command again to go on"
        ) from None
    result = SweepResult([job.measured() for job in jobs], sweep.settings())
    write_atomically(output / "sweep.json", result.to_json())
    return result


def _session(sweep: "_Sweep", point: Point, runtime: Runtime | None) -> Session | ExportedSession:
    def of_checkpoint(path: Path) -> Session:
        return Session(
            sweep.sources[path], sweep.dtype, sweep.options.device, sweep.scales.get(path), sweep.options.attention
        )

    if runtime is None or point.model not in sweep.exported:
        return of_checkpoint(point.model)
    full = of_checkpoint(point.compared_with) if point.compared_with else None
    return ExportedSession(point.model, sweep.exported[point.model], runtime, full)


def _scales_by_model(sources: Mapping[Path, Source], files: Sequence[Path]) -> dict[Path, Path]:
    """The file of each model that has one.

    Raises:
        CheckpointError: a file belongs to none of the models.
        UsageError: two files belong to one.
    """
    owners = {source.fingerprint: model for model, source in sources.items()}
    found: dict[Path, Path] = {}
    for file in files:
        owner = owners.get(read_any_ranges(file).model)
        if owner is None:
            raise CheckpointError(f"{file} was calibrated on none of {', '.join(map(str, sources))}")
        if owner in found:
            raise UsageError(f"{found[owner]} and {file} are both of {owner}; sweep them into two folders")
        found[owner] = file
    return found


def _check_scales(point: Point, scales: Path | None) -> None:
    static = [target for target in LAYER_TARGETS if point.recipe.is_static(target)]
    if static and scales is None:
        raise UsageError(f"{point.label} needs scales calibrated on {point.model}: pass --scales")
    if static and scales is not None:
        read_any_ranges(scales).check(point.recipe)


@dataclass(frozen=True)
class _Job:
    point: Point
    task: Task
    cell: Cell

    def measured(self) -> Measured:
        result = self.cell.read()
        return Measured(self.point, self.task.name, result, None if result else self.cell.read_failure())


@dataclass(frozen=True)
class _Sweep:
    options: SweepOptions
    tasks: list[Task]
    sources: dict[Path, Source]
    scales: dict[Path, Path]
    exported: dict[Path, ExportedModel]

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve(self.options.dtype, self.options.device)

    @cached_property
    def _identities(self) -> dict[str, dict[str, Any]]:
        return {task.name: task.identity() for task in self.tasks}

    def key(self, point: Point, task: Task) -> dict[str, Any]:
        """All that a cell's result depends on."""
        attention = {} if self.options.attention == "auto" else {"attention": self.options.attention}
        if point.model in self.exported:
            reference = {"device": torch.device(self.options.device).type} | attention
            return {
                "format": RESULT_FORMAT,
                "model": self.exported[point.model].identity,
                "compared_with": self.sources[point.compared_with].fingerprint if point.compared_with else None,
                "task": self._identities[task.name],
                "dtype": str(self.dtype).removeprefix("torch."),
                "versions": versions_of_run(self.options.device),
            } | (reference if point.compared_with else {})
        is_static = any(point.recipe.is_static(target) for target in LAYER_TARGETS)
        scales = {"scales": file_digest(self.scales[point.model])} if is_static else {}
        text = text_identity(point.recipe.rounding)
        return (
            scales
            | ({"rounding_text": text} if text else {})
            | {
                "format": RESULT_FORMAT,
                "model": self.sources[point.model].fingerprint,
                "recipe": point.recipe.to_dict(),
                "task": self._identities[task.name],
                "dtype": str(self.dtype).removeprefix("torch."),
                "device": torch.device(self.options.device).type,
                "versions": versions_of_run(self.options.device),
            }
            | attention
        )

    def settings(self) -> dict[str, Any]:
        return {
            "options": {name: _plain(value) for name, value in asdict(self.options).items()},
            "tasks": list(self._identities.values()),
            "models": {str(path): source.fingerprint for path, source in self.sources.items()},
            "quantized": [str(path) for path, source in self.sources.items() if source.packed or path.is_file()],
            "dtype": str(self.dtype).removeprefix("torch."),
            "versions": versions_of_run(self.options.device),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }


@dataclass
class _Counter:
    """Cells done, told as progress together with the share of the one under way."""

    total: int
    progress: Progress
    done: int = 0

    def inside(self, what: str) -> Progress:
        furthest = 0.0

        def tell(done: float, total: float, doing: str) -> None:
            nonlocal furthest
            # A cell counts as done when it is written; one that reads its reference first does not go back.
            furthest = max(furthest, min(done / total, 0.999) if total else 0.0)
            self.progress(self.done + furthest, self.total, f"{what}: {doing}")

        return tell

    def finish(self, what: str) -> None:
        self.done += 1
        self.progress(self.done, self.total, what)


def _measure(job: _Job, session: Session | ExportedSession, counter: _Counter) -> None:
    what = f"{job.point.model.name}, {job.point.label}, {job.task.name}"
    try:
        job.cell.write(session.measure(job.task, job.point.recipe, counter.inside(what)))
    except Exception as error:  # whatever it is, it must not end the other cells
        first_line = str(error).split("\n", 1)[0] or type(error).__name__
        job.cell.write_failure(first_line, "".join(traceback.format_exception(error)))
    counter.finish(what)


def _by_weights(jobs: list[_Job]) -> list[_Job]:
    """The same jobs, all of one set of weights together."""
    order = list(dict.fromkeys(str(job.point.recipe.weights) for job in jobs))
    return sorted(jobs, key=lambda job: order.index(str(job.point.recipe.weights)))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
