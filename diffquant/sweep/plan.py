"""The plan of a sweep: finds everything that can be wrong before the first cell is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffquant.attention import check_backend
from diffquant.errors import CheckpointError, UsageError
from diffquant.evals.task import Task
from diffquant.evals.tasks import make_tasks
from diffquant.loading import check_loadable
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.source.building import check_places
from diffquant.source.ranges import check_ranges_used, read_any_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.spelling import spelled
from diffquant.sweep.addresses import cell_key
from diffquant.sweep.cell import Cell
from diffquant.sweep.exported import (
    ExportedSubject,
    RuntimeOf,
    check_as_it_is,
    check_on_one_device,
    exported_points,
)
from diffquant.sweep.grid import OWN, RECIPE, Point, SweepOptions, points
from diffquant.sweep.subject import CheckpointSubject, Setup, Subject
from diffquant.sweep.work import Job


@dataclass(frozen=True)
class SweepPlan:
    """A sweep's points, tasks and opened models.

    Attributes:
        points: configurations to measure, a model's 16 bits first.
        sources: checkpoints by the path that the caller named.
        subjects: checkpoints and exported folders by the path that the caller named.
    """

    points: list[Point]
    tasks: list[Task]
    options: SweepOptions
    sources: dict[Path, Source]
    subjects: dict[Path, Subject]
    setup: Setup

    def jobs(self, folder: Path) -> list[Job]:
        """Every cell of the sweep, stored in this folder."""
        identities = {task.name: task.identity() for task in self.tasks}
        return [
            Job(subject, point, task, Cell(folder, cell_key(subject, point.recipe, task, identities[task.name])))
            for point in self.points
            for subject in [self.subjects[point.model]]
            for task in self.tasks
        ]


def plan_sweep(models: Sequence[Path], options: SweepOptions, runtime_of: RuntimeOf | None) -> SweepPlan:
    """Open every model and read every task's items.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: something is wrong with the models, options or data.
    """
    found = {model: runtime_of(model) if runtime_of else None for model in models}
    runtimes = {model: runtime for model, runtime in found.items() if runtime is not None}
    check_on_one_device(runtimes, options)
    device = resolve_device(options.computing_device)
    setup = Setup(resolve_dtype(options.dtype, device), device, options.attention, options.places)
    exported = {
        folder: ExportedSubject.of(folder, runtime, setup, options.device) for folder, runtime in runtimes.items()
    }
    checkpoints = [model for model in models if model not in exported]
    if not checkpoints and exported:
        check_as_it_is(options)
    grid = points(checkpoints, options) if checkpoints or not exported else []
    tasks = make_tasks(options.tasks, options.task_options, options.pass_tokens(device))
    check_backend(options.attention, (rounds for point in grid for rounds in point.recipe.rounds_maps))
    sources = {model: open_source(model) for model in checkpoints}
    grid += [_own_point(model, source) for model, source in sources.items() if _of_cache_and_logits(source) != Recipe()]
    grid.sort(key=lambda point: checkpoints.index(point.model))
    recipes = {model: [point.recipe for point in grid if point.model == model] for model in checkpoints}
    for model, source in sources.items():
        check_loadable(source, recipes[model])
        if setup.places is not None:
            check_places(source, setup.places, setup.dtype)
    scales = _scales_by_model(sources, options.scales)
    for point in grid:
        _check_scales(point, scales.get(point.model))
    for model, file in scales.items():
        check_ranges_used(file, recipes[model])
    subjects = {model: CheckpointSubject(source, setup, scales.get(model)) for model, source in sources.items()}
    folders = exported_points({folder: subject.model for folder, subject in exported.items()}, sources)
    origins = {point.model: subjects[point.compared_with] if point.compared_with else None for point in folders}
    compared = {folder: replace(subject, compared_with=origins[folder]) for folder, subject in exported.items()}
    return SweepPlan(grid + folders, tasks, options, sources, {**subjects, **compared}, setup)


def _own_point(model: Path, source: Source) -> Point:
    """A folder under all of the recipe that it records, whose other rows have its weights alone."""
    return Point(model, RECIPE, 0, OWN, _of_cache_and_logits(source), model)


def _of_cache_and_logits(source: Source) -> Recipe:
    """The cache and logits that a checkpoint's recipe names; its weights are as they are stored."""
    return source.recipe.with_weights_of(Recipe())


def _scales_by_model(sources: Mapping[Path, Source], files: Sequence[Path]) -> dict[Path, Path]:
    """The file of calibrated ranges for each model that has one.

    Raises:
        CheckpointError: a file belongs to none of the models.
        UsageError: two files belong to one.
    """
    owners = {source.fingerprint: model for model, source in sources.items()}
    files_by_model: dict[Path, Path] = {}
    for file in files:
        ranges = read_any_ranges(file)
        owner = owners.get(ranges.model)
        if owner is None:
            raise CheckpointError(f"{file} was calibrated on none of {', '.join(map(str, sources))}")
        ranges.check_model(sources[owner], str(file))
        if owner in files_by_model:
            raise UsageError(f"{files_by_model[owner]} and {file} are both of {owner}; sweep them into two folders")
        files_by_model[owner] = file
    return files_by_model


def _check_scales(point: Point, scales: Path | None) -> None:
    """Check that a point with static schemes has its ranges.

    Raises:
        UsageError: there is no file, or it has no ranges for these schemes.
    """
    static = [target for target in LAYER_TARGETS if point.recipe.is_static(target)]
    if static and scales is None:
        raise UsageError(f"{point.label} needs scales calibrated on {point.model}: pass {spelled('scales')}")
    if static and scales is not None:
        read_any_ranges(scales).check(point.recipe)
