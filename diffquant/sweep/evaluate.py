"""Evaluates one configuration of one model, without storing the result: a sweep of a single point."""

from collections.abc import Mapping
from pathlib import Path

from diffquant.attention import check_backend
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import make_tasks
from diffquant.loading import check_loadable
from diffquant.recipe import Recipe
from diffquant.source.ranges import check_ranges_used
from diffquant.source.source import open_source
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.progress import Progress, silent
from diffquant.sweep.exported import (
    ExportedSubject,
    RuntimeOf,
    check_as_it_is,
    check_on_one_device,
)
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.subject import CheckpointSubject, Setup, Subject


def evaluate(
    path: Path,
    recipe: Recipe | None,
    options: SweepOptions,
    progress: Progress = silent,
    runtime_of: RuntimeOf | None = None,
) -> dict[str, TaskResult]:
    """Measure every task of one configuration.

    Args:
        path: checkpoint, or exported folder, which is measured as it is.
        recipe: recipe to simulate; a quantized checkpoint's own by default.
        options: tasks and their options, dtype, device and scales; options of a grid are ignored.
        runtime_of: finds the runtime for an exported folder; not needed for checkpoints.

    Returns:
        Results by the task's name.

    Raises:
        DiffQuantError: the checkpoint, the tasks or their data cannot be read; all before the first item.
        NotFiredError: a layer did not quantize its logits or operands.
    """
    device = resolve_device(options.computing_device)
    check_backend(options.attention)
    runtime = runtime_of(path) if runtime_of else None
    if runtime is not None:
        check_on_one_device([path], options)
        check_as_it_is(options, recipe)
    tasks = make_tasks(options.tasks, options.task_options, options.pass_tokens(device))
    setup = Setup(resolve_dtype(options.dtype, device), device, options.attention, options.places)
    if runtime is not None:
        subject: Subject = ExportedSubject.of(path, runtime, setup, options.device)
    else:
        subject = _checkpoint_subject(path, recipe, options, setup)
    return {task.name: subject.measure(task, recipe, None, progress).result for task in tasks}


def results_text(results: Mapping[str, TaskResult]) -> str:
    """One line per task with its scalar results."""
    return "\n".join(f"{task}: {_scalars_text(result)}" for task, result in results.items())


def _checkpoint_subject(path: Path, recipe: Recipe | None, options: SweepOptions, setup: Setup) -> CheckpointSubject:
    source = open_source(path)
    check_loadable(source, [] if recipe is None else [recipe])
    applied = source.recipe if recipe is None else recipe
    check_backend(options.attention, applied.rounds_maps)
    scales = next(iter(options.scales), None)
    check_ranges_used(scales, [applied])
    return CheckpointSubject(source, setup, scales)


def _scalars_text(result: TaskResult) -> str:
    numbers = {
        name: value for name, value in result.to_dict().items() if isinstance(value, int | float) and name != "score"
    }
    return ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
