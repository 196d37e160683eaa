"""The verb `sweep`: a grid of bit widths, measured and written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, numbers, path_or_none, paths, task_values, texts
from diffquant.verbs.notes import chosen_device, say, wrote

if TYPE_CHECKING:
    from diffquant.measure.sweep.result import SweepResult

Granularities = Annotated[str | Sequence[str], kinds.Kind(str, "LIST", former="granularity")]
Recipes = Annotated[kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "FILE", repeats=True, former="recipe")]
Devices = Annotated[str | Sequence[str], kinds.Kind(str, "NAME", former="devices")]
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
    device: Devices = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    workers: kinds.Count | None = None,
    ray: Address | None = None,
    shard: Shard | None = None,
    planned: Callable[[str], None] | None = None,
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
        targets: what to quantize, each alone: logits, qk, p, pv, weights, kv, k, v.
        granularities: what shares one scale, such as row,tensor,row:shift; each applies to the targets that have it.
        recipes: YAML file of a recipe to measure as well.
        scales: ranges that diffquant calibrate wrote for one of the models, for static schemes.
        dtype: as `search` takes it.
        attention, device_map, offload_folder: as `generate` takes them.
        device: device that models run on: cpu, cuda or cuda:N; auto uses CUDA where there is a CUDA device; several,
            such as cuda:0,cuda:1, get a process each.
        workers: number of processes, here or on the Ray cluster, which share the cores.
        ray: Ray cluster that measures; auto finds the one that runs here.
        shard: measure one of N fixed parts, such as 3/16; run once without it in the end to write the tables.
        planned: function called with the cells to measure as text, before anything is written; what it raises ends the
            run.
        progress: function called with the cells done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        All cells, or those of the shard, with `table()` and `plot()`.

    Raises:
        DiffQuantError: what can be known before the first cell is wrong.
        FailedCellsError: some cells failed; the others are written, and the error's `result` has them all.
        KeyboardInterrupt: with a message that says how to go on.
    """
    from diffquant.measure.sweep.engines import choose_engine
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
        device_map=device_map,
        offload_folder=path_or_none(offload_folder),
    )
    devices = texts(device) or ("",)
    if len(devices) == 1:
        chosen_device(devices[0])
    folder, shown = Path(output), progress or progress_for("sweep")
    shown(0, 1, "opening the models")

    def on_plan(work: str) -> None:
        if planned is not None:
            planned(work)
        say(f"sweep: {work.splitlines()[0]}")

    options, engine = choose_engine(options, workers, devices, ray, say)
    result = run_sweep(paths(models), options, folder, shown, runtime_of, engine, on_plan, shard or "")
    if shard is None:
        wrote(write_outputs(result, folder))
    else:
        say(f"shard {shard} is done; the same command without {option_name('shard')} writes the tables")
    result.require_complete()
    return result
