"""Plans a sweep: finds errors before the first cell is measured, and estimates how long the cells take."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from diffquant.attention import check_backend
from diffquant.checkpoints.building import check_places
from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme
from diffquant.checkpoints.ranges import check_ranges_used, read_any_ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.tokens import encode_first_tokens
from diffquant.errors import CheckpointError, DiffQuantError, UsageError
from diffquant.family.call import dtype_name
from diffquant.measure.cells import RECIPE, Cell, SweepPoint
from diffquant.measure.sweep.cell import Run, cell_key
from diffquant.measure.sweep.exported import (
    ExportedSubject,
    RuntimeOf,
    Subject,
    check_no_precision_options,
    check_on_one_device,
    make_exported_points,
)
from diffquant.measure.sweep.grid import OWN, SweepOptions, list_points
from diffquant.measure.sweep.subject import CheckpointSubject
from diffquant.measure.task import Task
from diffquant.measure.tasks import make_tasks
from diffquant.quantization.loading import check_loadable
from diffquant.quantization.roundings import rounding_named
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.support.devices import log_once, measure_seconds_per_weight, resolve_device, resolve_dtype
from diffquant.support.files import read_bytes
from diffquant.support.installation import list_compute_versions
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject, parse_json
from diffquant.support.progress import format_duration

# Time of a cell divided by that of its matrix products with weights, if attention's logits or operands are rounded, and
# otherwise. Measured for a pocket model and SmolLM2-135M: 5 to 7, and 2 to 3.
_SIMULATED, _PLAIN = 6, 3


def plan_sweep(
    models: Sequence[Path], options: SweepOptions, folder: Path, runtime_of: RuntimeOf | None
) -> tuple[Run, JsonObject]:
    """Plan a sweep: open every model, read every task's items, and list the cells to measure.

    Args:
        folder: folder of the cells.
        runtime_of: returns the runtime for an exported folder, or None if the path is a checkpoint; needed only if
            there are exported folders.

    Returns:
        The planned sweep, and the settings that its result records in addition to the cells.

    Raises:
        UsageError, CheckpointError, MissingDependencyError: a model, an option or a task's data cannot be used.
    """
    found = {model: runtime_of(model) if runtime_of else None for model in models}
    runtimes = {model: runtime for model, runtime in found.items() if runtime is not None}
    check_on_one_device(runtimes, options)
    device = resolve_device(options.computing_device)
    dtype, places = resolve_dtype(options.dtype, device), options.device_placement
    exported = {
        path: ExportedSubject.from_folder(path, runtime, options.device, dtype, device)
        for path, runtime in runtimes.items()
    }
    checkpoints = [model for model in models if model not in exported]
    if not checkpoints and exported:
        check_no_precision_options(options)
    grid = list_points(checkpoints, options) if checkpoints or not exported else []
    tasks = make_tasks(options.tasks, options.task_options, options.batch_tokens_for(device))
    check_backend(options.attention, (rounds for point in grid for rounds in point.recipe.map_rounding_choices))
    sources = {model: open_source(model) for model in checkpoints}
    # A quantized folder also runs under the whole recipe that it records, cache and logits included. Its weights are
    # already stored quantized.
    recorded = {model: source.recipe.with_weights_of(Recipe()) for model, source in sources.items()}
    grid += [SweepPoint(model, RECIPE, 0, OWN, own, model) for model, own in recorded.items() if own != Recipe()]
    grid.sort(key=lambda point: checkpoints.index(point.model))
    recipes = {model: [point.recipe for point in grid if point.model == model] for model in checkpoints}
    for model, source in sources.items():
        check_loadable(source, recipes[model])
        note_overlap(source, [source.recipe, *recipes[model]], tasks)
        if places is not None:
            check_places(source, places, dtype)
    scales = _scales_by_model(sources, options.scales)
    for point in grid:
        _check_scales(point, sources[point.model], scales.get(point.model))
    for model, file in scales.items():
        check_ranges_used(file, recipes[model])
    checkpoint_subjects = {
        model: CheckpointSubject(source, dtype, device, options.attention, places, scales.get(model))
        for model, source in sources.items()
    }
    folders = make_exported_points({path: subject.model for path, subject in exported.items()}, sources)
    subjects: dict[Path, Subject] = {**checkpoint_subjects}
    for point in folders:
        origin = checkpoint_subjects[point.compared_with] if point.compared_with else None
        subjects[point.model] = replace(exported[point.model], compared_with=origin)
    identities = {task.name: task.identity() for task in tasks}
    cells = []
    for point, task in product(grid + folders, tasks):
        key = cell_key(subjects[point.model], point.recipe, task, identities[task.name])
        cells.append(Cell(point, task.name, key=key, folder=folder))
    settings = {
        "options": options.to_dict() | {"device": device, "batch_tokens": options.batch_tokens_for(device)},
        "tasks": list({cell.task: cell.key["task"] for cell in cells}.values()),
        "unseen": {task.name: unseen for task in tasks if (unseen := task.untracked_inputs())},
        "models": {str(path): source.fingerprint for path, source in sources.items()},
        "quantized": [str(path) for path, source in sources.items() if source.packed or path.is_file()],
        "source_bytes": {str(path): source.checkpoint.stored_nbytes for path, source in sources.items()},
        # An exported model computes in the dtype it was exported with.
        "dtype": dtype_name(dtype) if sources else None,
        "versions": list_compute_versions(device),
    }
    return Run(cells, subjects, {task.name: task for task in tasks}), settings


def note_overlap(source: Source, recipes: Iterable[Recipe], tasks: Sequence[Task]) -> None:
    """Warn about tasks whose text also calibrates the weight rounding of some recipe, if that text is available."""
    message = "%s: %s of the text's %s tokens are also calibration data of %s; give another text to compare"
    texts = {task.name: text for task in tasks if (text := getattr(task, "text", None))}
    for settings in dict.fromkeys(recipe.rounding for recipe in recipes if recipe.weights.quantizes):
        rounding = rounding_named(settings.name)
        if not texts or not rounding.needs_text:
            continue
        with suppress(DiffQuantError):
            calibration = rounding.read_calibration(source, settings)
            for name, text in texts.items():
                tokens = encode_first_tokens(source.tokenizer, text, len(text))
                if count := calibration.count_overlap([tokens]):
                    log_once(__name__, logging.WARNING, message, name, f"{count:,}", f"{len(tokens):,}", rounding.name)


def _scales_by_model(sources: Mapping[Path, Source], files: Sequence[Path]) -> dict[Path, Path]:
    """Assign files of calibrated ranges to models.

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
            raise CheckpointError(f"{file} was calibrated on none of {', '.join(map(str, sources))}; leave it out")
        ranges.check_model(sources[owner], str(file))
        if owner in files_by_model:
            raise UsageError(
                f"{files_by_model[owner]} and {file} are both ranges of {owner}; sweep them into two folders"
            )
        files_by_model[owner] = file
    return files_by_model


def _check_scales(point: SweepPoint, source: Source, scales: Path | None) -> None:
    """Check that a point with static schemes has its ranges, from a file or stored in the checkpoint.

    Raises:
        UsageError: there are none, or the file has none for these schemes.
    """
    static = [target for target in LAYER_TARGETS if point.recipe.is_static(target)]
    stored = ("k", "v") if has_own_kv_cache_scheme(source.checkpoint.config) else ()
    if scales is None and not set(static) <= set(stored):
        raise UsageError(f"{point.label} needs scales calibrated on {point.model}: pass {option_name('scales')}")
    if static and scales is not None:
        read_any_ranges(scales).check_recipe(point.recipe)


def describe_work(run: Run) -> str:
    """Describe the cells that have no result yet.

    The first line has their number and the estimated time; then each cell has a line.
    """
    missing = [cell for cell in run.cells if cell.result is None]
    count, seconds = len(run.cells) - len(missing), estimate_seconds(run)
    held = f"; {count} {'is' if count == 1 else 'are'} already measured" if count else ""
    if not missing:
        return f"nothing to measure{held}"
    time = "; the first cell will show how long one takes"
    if seconds is not None:
        time = f"; about {format_duration(seconds)}, if cells run one at a time"
    cells = "1 cell" if len(missing) == 1 else f"{len(missing)} cells"
    return "\n".join([f"{cells} to measure{held}{time}", *(f"  {cell.caption}" for cell in missing)])


def estimate_seconds(run: Run) -> float | None:
    """Estimate the seconds that the cells without a result take, or return None if some cannot be estimated.

    It uses the mean time of measured cells of the same model and task. If there are none, it uses the number of
    multiplications in the model and the speed of this machine.
    """
    held: dict[tuple[Path, str], list[float]] = {}
    for cell in run.cells:
        if cell.result is not None:
            held.setdefault((cell.point.model, cell.task), []).append(cell.result.seconds or 0.0)
    products, seconds = 0, 0.0
    is_known = True
    for cell in run.cells:
        if cell.result is not None:
            continue
        if alike := held.get((cell.point.model, cell.task)):
            seconds += mean(alike)
        elif work := _products(run, cell):
            products += work
        else:
            is_known = False
    if products:
        seconds += products * measure_seconds_per_weight()
    return seconds if is_known else None


def _products(run: Run, cell: Cell) -> int | None:
    """Estimate a cell's time as a number of products of a weight and a token, or return None if it is unknown."""
    subject, tokens = run.subject_of(cell), run.tasks[cell.task].total_tokens
    if tokens is None or not isinstance(subject, CheckpointSubject) or subject.device != "cpu":
        return None
    recipe = cell.point.recipe
    is_simulated = any(recipe.map_rounding_choices) or recipe.qk.quantizes or recipe.pv.quantizes
    return tokens * subject.source.weight_count * (_SIMULATED if is_simulated else _PLAIN)


def explain_remeasuring(folder: Path, missing: Sequence[JsonObject]) -> str | None:
    """Explain which changes of code or versions cause cells to be measured again, or return None if there are none.

    Args:
        folder: folder of the stored cells.
        missing: keys of the cells without a result.
    """
    before = {_lasting_key(key): key for key in _keys_in(folder)}
    pairs = [(before[_lasting_key(key)], key) for key in missing if _lasting_key(key) in before]
    if not pairs:
        return None
    reasons = ["other code"] if any(old.get("code") != new["code"] for old, new in pairs) else []
    for old, new in pairs:
        was, now = old.get("versions", {}), new["versions"]
        reasons += [
            f"{name} {was.get(name, 'absent')} (now {now.get(name, 'absent')})"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
    causes = ", and with ".join(dict.fromkeys(reasons))
    return f"{len(pairs)} of the {len(missing)} missing cells were measured in {folder} before, but with {causes}"


def _lasting_key(key: JsonObject) -> str:
    """Return the parts of a key that an update of the code or its dependencies does not change."""
    return json.dumps({name: value for name, value in key.items() if name not in ("code", "versions")}, sort_keys=True)


def _keys_in(folder: Path) -> Iterator[JsonObject]:
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            entry = parse_json(read_bytes(file))
            if "result" in entry and isinstance(entry["key"], dict):
                yield entry["key"]
