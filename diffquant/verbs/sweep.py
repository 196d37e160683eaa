"""The verb `sweep`: measures models at several bit widths and writes a report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, parse_bits, read_task_options, split_texts, to_path, to_paths
from diffquant.verbs.notes import choose_device, say, say_files_written

if TYPE_CHECKING:
    from diffquant.measure.sweep.result import SweepResult

Granularities = Annotated[str | Sequence[str], kinds.Kind(str, "LIST", former_name="granularity")]
Recipes = Annotated[
    kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "FILE", is_repeatable=True, former_name="recipe")
]
Devices = Annotated[str | Sequence[str], kinds.Kind(str, "NAME", former_name="devices")]
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
    device: Devices = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    workers: kinds.Count | None = None,
    ray: kinds.Address | None = None,
    shard: Shard | None = None,
    on_plan: Callable[[str], None] | None = None,
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
        targets: targets to quantize, one at a time: logits, qk, p, pv, weights, kv, k, v, and activations of
            packed checkpoints.
        granularities: granularities such as row,tensor,row:shift; each applies to the targets that support it.
        recipes: YAML file of a recipe to also measure.
        scales: ranges that diffquant calibrate wrote for one of the models, for static schemes.
        dtype: see `search`.
        attention, device_map, offload_folder: see `generate`.
        device: device to run on: cpu, cuda or cuda:N; auto selects CUDA if available. A list such as cuda:0,cuda:1
            starts one process per device.
        workers: number of processes, which share the cores of this machine or of the Ray cluster.
        ray: address of a Ray cluster to run on; auto finds one that runs on this machine.
        shard: measure only one of N fixed parts, such as 3/16. Afterwards run once without shard to write the tables.
        on_plan: function called with a description of the planned measurements before anything is written; an exception
            in it ends the run.
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

    options = SweepOptions(
        tasks=split_texts(tasks),
        bits=parse_bits(bits),
        targets=split_texts(targets),
        granularities=split_texts(granularities),
        recipes=to_paths(recipes),
        scales=to_paths(scales),
        task_options=read_task_options(task_options, sweep),
        dtype=dtype,
        attention=attention,
        device_map=device_map,
        offload_folder=to_path(offload_folder),
    )
    # Imported after the options are checked, since these import torch.
    from diffquant.measure.sweep.engines import choose_engine
    from diffquant.measure.sweep.outputs import write_outputs
    from diffquant.measure.sweep.run import run_sweep
    from diffquant.onnx.targets import runtime_of

    devices = split_texts(device) or ("",)
    if len(devices) == 1:
        choose_device(devices[0])
    folder, shown = Path(output), progress or progress_for("sweep")
    shown(0, 1, "opening the models")

    def report_plan(work: str) -> None:
        if on_plan is not None:
            on_plan(work)
        say(f"sweep: {work.splitlines()[0]}")

    options, engine = choose_engine(options, workers, devices, ray, say)
    result = run_sweep(to_paths(models), options, folder, shown, runtime_of, engine, report_plan, shard or "")
    if shard is None:
        say_files_written(write_outputs(result, folder))
    else:
        say(f"shard {shard} is done; the same command without {option_name('shard')} writes the tables")
    result.require_complete()
    return result
