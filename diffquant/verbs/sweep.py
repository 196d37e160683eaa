"""The verb `sweep`: a grid of bit widths, measured and written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UsageError
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, numbers, path_or_none, paths, task_values, texts
from diffquant.verbs.notes import chosen_device, say, wrote

if TYPE_CHECKING:
    from diffquant.measure.sweep.grid import SweepOptions
    from diffquant.measure.sweep.plan import SweepForecast
    from diffquant.measure.sweep.result import SweepResult
    from diffquant.measure.sweep.workers import Engine

Granularities = Annotated[str | Sequence[str], kinds.Kind(str, "LIST", former="granularity")]
Recipes = Annotated[kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "FILE", repeats=True, former="recipe")]
Address = Annotated[str, kinds.Kind(str, "ADDRESS")]
Shard = Annotated[str, kinds.Kind(str, "I/N")]


@check_arguments
def sweep(
    models: kinds.Models,
    output: kinds.NewFolder,
    tasks: kinds.Tasks = "hellaswag",
    *,
    bits: kinds.Numbers = "16,8,6,4",
    targets: kinds.Targets = "logits",
    granularities: Granularities = "",
    recipes: Recipes = (),
    scales: kinds.Files = (),
    dtype: kinds.Name = "auto",
    attention: kinds.Name = "auto",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    workers: kinds.Count | None = None,
    devices: kinds.Names = "",
    ray: Address | None = None,
    shard: Shard | None = None,
    planned: "Callable[[SweepForecast], None] | None" = None,
    progress: Progress | None = None,
    **task_options: object,
) -> "SweepResult":
    """Measure what each bit width costs, in a table and a page.

        diffquant sweep transformer diff -o sweep --targets logits --bits 16,8,6,4
        diffquant.sweep(["transformer", "diff"], "sweep", "needle", bits="16,8,4", limit=20)

    Exported folders may be among the models. Results that the folder holds already are not measured again, and any
    number of sweeps may write into one folder at a time.

    Args:
        models: each a checkpoint folder (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub; for
            instance a DIFF model and its Transformer.
        output: folder for cells, table, plot and report.
        tasks: tasks, separated by commas.
        bits: bit widths, 2 to 8; 16 is always measured, and floats such as e4m3 by a recipe.
        targets: what to quantize, each alone: logits, qk, p, pv, weights, kv, k, v, or activations of
            a checkpoint with packed weights.
        granularities: what shares one scale, such as row,tensor,row:shift; each applies to the targets that have it.
        recipes: YAML file of a recipe to measure as well.
        scales: ranges that diffquant calibrate wrote for one of the models, for static schemes.
        dtype: as `search` takes it.
        attention, device, device_map, offload_folder: as `generate` takes them.
        workers: number of processes, here or on the Ray cluster, which share the cores.
        devices: devices such as cuda:0,cuda:1, in place of `device`; a process each.
        ray: Ray cluster that measures; auto finds the one that runs here.
        shard: measure one of N fixed parts, such as 3/16; run once without it in the end to write the tables.
        planned: function called with the cells to measure, before anything is written; what it raises ends the run.
        progress: function called with the cells done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        All cells, or those of the shard, with `table()` and `plot()`.

    Raises:
        DiffQuantError: what can be known before the first cell is wrong.
        FailedCellsError: some cells failed; the others are written, and the error's `result` has them all.
        KeyboardInterrupt: with a message that says how to go on.
    """
    from diffquant.measure.sweep.grid import SweepOptions
    from diffquant.measure.sweep.outputs import write_outputs
    from diffquant.measure.sweep.run import run_sweep
    from diffquant.onnx.targets import runtime_of

    options = SweepOptions(
        tasks=texts(tasks),
        bits=numbers("bits", bits),
        targets=texts(targets),
        granularities=texts(granularities),
        recipes=paths(recipes),
        scales=paths(scales),
        task_options=task_values(task_options, sweep),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=path_or_none(offload_folder),
    )
    chosen_device(device)
    folder, shown = Path(output), progress or progress_for("sweep")
    shown(0, 1, "opening the models")

    def on_plan(cells: "SweepForecast") -> None:
        if planned is not None:
            planned(cells)
        say(f"sweep: {cells.headline}")

    options, engine = choose_engine(options, workers, texts(devices), ray, say)
    result = run_sweep(paths(models), options, folder, shown, runtime_of, engine, on_plan, shard or "")
    if shard is None:
        wrote(write_outputs(result, folder))
    else:
        say(f"shard {shard} is done; the same command without {option_name('shard')} writes the tables")
    result.require_complete()
    return result


def choose_engine(
    options: "SweepOptions", workers: int | None, devices: Sequence[str], ray: str | None, say: Callable[[str], None]
) -> "tuple[SweepOptions, Engine]":
    """Choose where cells are measured, and set the device in the options.

    Args:
        workers: number of processes; by default one per device.
        devices: devices to use, one process each; empty to use `options.device` alone.
        ray: address of a Ray cluster, or None to run on this machine.
        say: called with a line on how threads and memory are shared out.

    Raises:
        UsageError: options that exclude each other, or a device that is not there.
        MissingDependencyError: Ray is not installed.
    """
    from diffquant.measure.sweep.workers import run_processes

    if workers is not None and workers < 1:
        raise UsageError(f"the number of workers must be 1 or more, got {workers}")
    if options.device_map is not None and (workers not in (None, 1) or devices or ray):
        raise UsageError(
            f"{option_name('device_map')} spreads each model over all devices: leave out {option_name('workers')}, "
            f"{option_name('devices')} and {option_name('ray')}"
        )
    if ray is not None:
        from diffquant.measure.sweep.ray_cluster import require_ray, run_on_ray

        if devices:
            raise UsageError(
                f"{option_name('devices')} are this machine's, and {option_name('ray')} gives each of its workers "
                f"a GPU: leave one of them out"
            )
        require_ray()
        return options, partial(run_on_ray, address=ray, workers=workers)
    if not devices:
        return options, partial(run_processes, workers=workers or 1, say=say)
    from diffquant.support.devices import check_device  # which imports torch

    if options.device != "auto":
        raise UsageError(f"{option_name('devices')} takes the place of {option_name('device')}; give one or the other")
    for device in devices:
        check_device(device)
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise UsageError(
            f"{option_name('devices', ','.join(devices))} are not of one kind, and results of another kind are "
            f"other cells"
        )
    processes = partial(run_processes, workers=workers or len(devices), devices=devices, say=say)
    return replace(options, device=kinds.pop()), processes
