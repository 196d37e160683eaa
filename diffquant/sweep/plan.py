"""The plan of a sweep: everything that can be wrong is wrong here, before the first cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffquant.attention import check_backend
from diffquant.errors import CheckpointError, UsageError
from diffquant.evals.task import Task
from diffquant.evals.tasks import make_tasks
from diffquant.loading import check_loadable
from diffquant.recipe import LAYER_TARGETS
from diffquant.source.building import check_places
from diffquant.source.ranges import check_ranges_used, read_any_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.spelling import spelled
from diffquant.sweep.exported import (
    ExportedSubject,
    RuntimeOf,
    check_as_it_is,
    check_on_one_device,
    exported_points,
    folder_state,
    runtimes_among,
)
from diffquant.sweep.grid import Point, SweepOptions, points
from diffquant.sweep.session import CheckpointSubject, Setup, Subject


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep will do: its points and tasks, and what each model is opened from.

    Attributes:
        points: configurations to measure, a model's 16 bits first.
        sources: checkpoints by the path that the caller named.
        subjects: checkpoints and exported folders by the path that the caller named.
    """

    points: list[Point]
    tasks: list[Task]
    sources: dict[Path, Source]
    subjects: dict[Path, Subject]
    setup: Setup


def plan_sweep(models: Sequence[Path], options: SweepOptions, runtime_of: RuntimeOf) -> SweepPlan:
    """Open every model and read every task's items.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: whatever is wrong with models, options or data.
    """
    runtimes = runtimes_among(models, runtime_of)
    check_on_one_device(runtimes, options)
    states = {folder: folder_state(folder) for folder in runtimes}
    exported = {folder: runtime.describe(folder, options.device) for folder, runtime in runtimes.items()}
    checkpoints = [model for model in models if model not in exported]
    if not checkpoints and exported:
        check_as_it_is(options)
    grid = points(checkpoints, options) if checkpoints or not exported else []
    device = resolve_device(options.computing_device)
    tasks = make_tasks(options.tasks, options.task_options, options.pass_tokens(device))
    check_backend(options.attention, (scheme for point in grid for scheme in point.recipe.schemes_of("logits")))
    sources = {model: open_source(model) for model in checkpoints}
    recipes = {model: [point.recipe for point in grid if point.model == model] for model in checkpoints}
    setup = Setup(resolve_dtype(options.dtype, device), device, options.attention, options.places)
    for model, source in sources.items():
        check_loadable(source, recipes[model])
        if setup.places is not None:
            check_places(source, setup.places, setup.dtype)
    scales = _scales_by_model(sources, options.scales)
    for point in grid:
        _check_scales(point, scales.get(point.model))
    for model, file in scales.items():
        check_ranges_used(file, recipes[model])
    checkpoints_by_path = {
        model: CheckpointSubject(source, setup, scales.get(model)) for model, source in sources.items()
    }
    folders = exported_points(exported, sources)
    exports = {
        point.model: ExportedSubject(
            point.model,
            exported[point.model],
            runtimes[point.model],
            checkpoints_by_path[point.compared_with] if point.compared_with else None,
            setup,
            options.device,
            states[point.model],
        )
        for point in folders
    }
    return SweepPlan(grid + folders, tasks, sources, {**checkpoints_by_path, **exports}, setup)


def _scales_by_model(sources: Mapping[Path, Source], files: Sequence[Path]) -> dict[Path, Path]:
    """The file of calibrated ranges of each model that has one.

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
        UsageError: it has no file, or one without ranges for these schemes.
    """
    static = [target for target in LAYER_TARGETS if point.recipe.is_static(target)]
    if static and scales is None:
        raise UsageError(f"{point.label} needs scales calibrated on {point.model}: pass {spelled('scales')}")
    if static and scales is not None:
        read_any_ranges(scales).check(point.recipe)
