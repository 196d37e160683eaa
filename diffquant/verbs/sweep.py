"""The verb `sweep`: measures models at several bit widths and writes a report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UsageError
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, parse_numbers, read_task_options, split_texts, to_path, to_paths
from diffquant.verbs.notes import choose_device, say, say_files_written

if TYPE_CHECKING:
    from diffquant.measure.sweep.grid import SweepOptions
    from diffquant.measure.sweep.plan import SweepForecast
    from diffquant.measure.sweep.result import SweepResult
    from diffquant.measure.sweep.workers import Engine

Granularities = Annotated[str | Sequence[str], kinds.Kind(str, "LIST", former_name="granularity")]
Recipes = Annotated[
    kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "FILE", is_repeatable=True, former_name="recipe")
]
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
    on_plan: "Callable[[SweepForecast], None] | None" = None,
    progress: Progress | None = None,
    **task_options: object,
) -> "SweepResult":
    """Measure accuracy at several bit widths, and write a report.

        diffquant sweep transformer diff -o sweep --targets logits --bits 16,8,6,4
        diffquant.sweep(["transformer", "diff"], "sweep", "needle", bits="16,8,4", limit=20)

    Models may be exported folders. Results that are already in the output folder are not measured again. Several sweeps
    may write into one folder at the same time.

    Args:
        models: models to compare, such as a DIFF model and its baseline Transformer. Each is a checkpoint folder
            (safetensors), .gguf file, or ORG/NAME[@REVISION] on the Hugging Face hub.
        output: folder for results, table, plot and report.
        tasks: tasks, separated by commas.
        bits: bit widths from 2 to 8; 16 is always measured. Use recipes for floats such as e4m3.
        targets: targets to quantize, one at a time: logits, qk, p, pv, weights, kv, k, v.
        granularities: granularities such as row,tensor,row:shift; each applies to the targets that support it.
        recipes: YAML file of a recipe to also measure.
        scales: ranges that diffquant calibrate wrote for one of the models, for static schemes.
        dtype: see `search`.
        attention, device, device_map, offload_folder: see `generate`.
        workers: number of processes, which share the cores of this machine or of the Ray cluster.
        devices: devices such as cuda:0,cuda:1, instead of `device`; each gets one process.
        ray: address of a Ray cluster to run on; auto finds one that runs on this machine.
        shard: measure only one of N fixed parts, such as 3/16. Afterwards run once without shard to write the tables.
        on_plan: function called with the planned measurements before anything is written; an exception in it ends the
            run.
        progress: function called with the measurements done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        All results, or those of the shard, with `table()` and `plot()`.

    Raises:
        DiffQuantError: an argument is wrong; raised before the first measurement.
        FailedCellsError: some measurements failed; the others are written and in the error's `result`.
        KeyboardInterrupt: interrupted; the message says how to resume.
    """
    from diffquant.measure.sweep.grid import SweepOptions
    from diffquant.measure.sweep.outputs import write_outputs
    from diffquant.measure.sweep.run import run_sweep
    from diffquant.onnx.targets import runtime_of

    options = SweepOptions(
        tasks=split_texts(tasks),
        bits=parse_numbers("bits", bits),
        targets=split_texts(targets),
        granularities=split_texts(granularities),
        recipes=to_paths(recipes),
        scales=to_paths(scales),
        task_options=read_task_options(task_options, sweep),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=to_path(offload_folder),
    )
    choose_device(device)
    folder, shown = Path(output), progress or progress_for("sweep")
    shown(0, 1, "opening the models")

    def report_plan(cells: "SweepForecast") -> None:
        if on_plan is not None:
            on_plan(cells)
        say(f"sweep: {cells.headline}")

    options, engine = choose_engine(options, workers, split_texts(devices), ray, say)
    result = run_sweep(to_paths(models), options, folder, shown, runtime_of, engine, report_plan, shard or "")
    if shard is None:
        say_files_written(write_outputs(result, folder))
    else:
        say(f"shard {shard} is done; the same command without {option_name('shard')} writes the tables")
    result.require_complete()
    return result


def choose_engine(
    options: "SweepOptions", workers: int | None, devices: Sequence[str], ray: str | None, say: Callable[[str], None]
) -> "tuple[SweepOptions, Engine]":
    """Choose the processes that measure (in this process, in several, or on Ray), and set the device in the options.

    Args:
        workers: number of processes; by default one per device.
        devices: devices to use, one process each; empty to use `options.device` alone.
        ray: address of a Ray cluster, or None to run on this machine.
        say: called with a line on how threads and memory are divided among processes.

    Raises:
        UsageError: options exclude each other, or a device does not exist.
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
                f"{option_name('devices')} selects devices of this machine, but {option_name('ray')} uses "
                f"GPUs of the cluster; leave out one of them"
            )
        require_ray()
        return options, partial(run_on_ray, address=ray, workers=workers)
    if not devices:
        return options, partial(run_processes, workers=workers or 1, say=say)
    from diffquant.support.devices import check_device  # which imports torch

    if options.device != "auto":
        raise UsageError(f"{option_name('devices')} replaces {option_name('device')}; give only one")
    for device in devices:
        check_device(device)
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise UsageError(
            f"{option_name('devices', ','.join(devices))} are of different kinds, whose results differ; "
            f"give devices of one kind"
        )
    processes = partial(run_processes, workers=workers or len(devices), devices=devices, say=say)
    return replace(options, device=kinds.pop()), processes
