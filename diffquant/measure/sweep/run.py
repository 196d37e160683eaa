"""Runs a sweep: measures every missing cell and writes it at once; or one configuration, without storing it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from diffquant.attention import check_backend
from diffquant.checkpoints.ranges import check_ranges_used
from diffquant.checkpoints.source import open_source
from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.cell import measure_all, remove_locks
from diffquant.measure.sweep.engines import Engine
from diffquant.measure.sweep.exported import (
    ExportedSubject,
    RuntimeOf,
    Subject,
    check_no_precision_options,
    check_on_one_device,
)
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.plan import describe_work, explain_remeasuring, note_overlap, plan_sweep
from diffquant.measure.sweep.result import SweepResult
from diffquant.measure.sweep.subject import CheckpointSubject
from diffquant.measure.tasks import make_tasks
from diffquant.quantization.loading import check_loadable
from diffquant.recipe import Recipe
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.files import write_atomically
from diffquant.support.installation import provenance
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, report_nothing

_logger = logging.getLogger(__name__)


def run_sweep(
    models: Sequence[Path],
    options: SweepOptions,
    output: Path,
    progress: Progress = report_nothing,
    runtime_of: RuntimeOf | None = None,
    engine: Engine = measure_all,
    on_plan: Callable[[str], None] | None = None,
    shard: str = "",
) -> SweepResult:
    """Measure every cell that `output` does not hold yet, and write sweep.json.

    Args:
        models: checkpoints and exported folders. A folder is one row, compared with the checkpoint it was made
            from if that is in the sweep.
        runtime_of: returns the runtime for an exported folder, or None if the path is a checkpoint; needed only if
            there are exported folders.
        engine: function that measures the cells; by default in this process.
        on_plan: called with a description of the work before anything is written; an exception that it raises ends the
            sweep.
        shard: "I/N" to measure the I-th of N parts, and write only its cells; empty for all.

    A failed cell is recorded and the sweep continues; `SweepResult.require_complete` raises for it. An interrupt loses
    only the current cell: the same call resumes from there. Other sweeps may use `output` at the same time; cells that
    they share are measured by one of them.

    Returns:
        All cells, or those of the shard.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: an error was found before the first cell.
        OutputExistsError: a file that the sweep would replace was not written by a sweep.
        DiffQuantError: `output` is gone, or no process is left to measure the cells.
        KeyboardInterrupt: the sweep was interrupted; the message says how to resume.
    """
    from diffquant.measure.sweep.outputs import sweep_files

    number, count = _parse_shard(shard)
    sweep_files().check(output)
    folder = output / "cells"
    run, settings = plan_sweep([Path(model) for model in models], options, folder, runtime_of)
    cells = [replace(cell, result=cell.read()) for cell in _take_shard(run.cells, number, count)]
    if on_plan is not None:
        on_plan(describe_work(replace(run, cells=cells)))
    folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if cell.result is None]
    if missing and (why := explain_remeasuring(folder, [cell.key for cell in missing])):
        _logger.warning("%s; they are measured again", why)
    try:
        if missing:
            engine(replace(run, cells=_sort_by_weights(missing)), progress)
    except KeyboardInterrupt:
        done = sum(cell.read() is not None for cell in cells)
        raise KeyboardInterrupt(
            f"interrupted: {done} of {len(cells)} cells are done and kept in {folder}; "
            "run the same command again to resume"
        ) from None
    finally:
        remove_locks(cells)
    result = SweepResult([_read_cell(cell) for cell in cells], settings | provenance())
    if not shard:
        write_atomically(output / "sweep.json", result.to_json())
    return result


def _parse_shard(shard: str) -> tuple[int, int]:
    """Parse I/N: the number of a part, counted from 1, and the number of parts.

    Raises:
        UsageError: it is not I/N with 1 <= I <= N.
    """
    number, _, count = (shard or "1/1").partition("/")
    # Digits of other scripts, and very long numbers, are refused too.
    if not all(text.isascii() and text.isdigit() and len(text) < 9 for text in (number, count)) or not (
        1 <= int(number) <= int(count)
    ):
        raise UsageError(f"{option_name('shard')} takes I/N with I from 1 to N, such as 3/16, got {shard!r}")
    return int(number), int(count)


def _take_shard(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """Return one of `count` parts of the cells, with as few models and sets of weights as possible."""
    ordered = _sort_by_weights(cells)
    part = {cell.name for cell in ordered[len(ordered) * (number - 1) // count : len(ordered) * number // count]}
    return [cell for cell in cells if cell.name in part]


def _sort_by_weights(cells: Sequence[Cell]) -> list[Cell]:
    """Sort cells by the weights they need, of which a process holds one set at a time."""
    # A model's points are consecutive, so its sets of weights are too.
    first: dict[object, int] = {}
    places = [first.setdefault(cell.weights_key, len(first)) for cell in cells]
    return [cells[number] for number in sorted(range(len(cells)), key=lambda number: places[number])]


def _read_cell(cell: Cell) -> Cell:
    result = cell.read()
    error = cell.read_failure() if result is None else None
    if result is None and error is None:
        # Another sweep has measured the failed cell in the meantime.
        result = cell.read()
    if result is None and error is None:
        raise DiffQuantError(f"{cell.path} is gone or damaged since it was written; run the same command again")
    return replace(cell, result=result, error=error)


def evaluate(
    path: Path,
    recipe: Recipe | None,
    options: SweepOptions,
    progress: Progress = report_nothing,
    runtime_of: RuntimeOf | None = None,
) -> dict[str, TaskResult]:
    """Measure every task of one configuration.

    Args:
        path: checkpoint, or exported folder, which is measured in its own precision.
        recipe: recipe to simulate; by default the one that a quantized checkpoint records.
        options: tasks and their options, dtype, device and scales; bits, targets, granularities and recipes are
            ignored.
        runtime_of: returns the runtime for an exported folder, or None if the path is a checkpoint; needed only if
            `path` is an exported folder.

    Returns:
        Results by the task's name.

    Raises:
        DiffQuantError: the checkpoint, the tasks or their data cannot be read, which is raised before the first item,
            or a layer did not quantize its cache, logits or operands.
    """
    device = resolve_device(options.computing_device)
    check_backend(options.attention)
    runtime = runtime_of(path) if runtime_of else None
    if runtime is not None:
        check_on_one_device([path], options)
        check_no_precision_options(options, recipe)
    tasks = make_tasks(options.tasks, options.task_options, options.batch_tokens_for(device))
    dtype = resolve_dtype(options.dtype, device)
    if runtime is not None:
        subject: Subject = ExportedSubject.from_folder(path, runtime, options.device, dtype, device)
    else:
        source = open_source(path)
        check_loadable(source, [] if recipe is None else [recipe])
        applied = source.recipe if recipe is None else recipe
        check_backend(options.attention, applied.map_rounding_choices)
        scales = next(iter(options.scales), None)
        check_ranges_used(scales, [applied])
        subject = CheckpointSubject(source, dtype, device, options.attention, options.device_placement, scales)
        note_overlap(source, [applied], tasks)
    return {task.name: subject.measure(task, recipe, None, progress) for task in tasks}


def format_results(results: Mapping[str, TaskResult]) -> str:
    """Write one line per task with its scalar results."""
    return "\n".join(f"{task}: {_scalars_text(result)}" for task, result in results.items())


def _scalars_text(result: TaskResult) -> str:
    numbers = {
        name: value for name, value in result.to_dict().items() if isinstance(value, int | float) and name != "score"
    }
    return ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
