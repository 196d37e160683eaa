"""The verb `sweep`: a grid of bit widths, measured and written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UsageError
from diffquant.support.progress import Progress, progress_for
from diffquant.support.spelling import spelled
from diffquant.verbs import kinds
from diffquant.verbs.arguments import numbers, path_or_none, paths, task_values, texts
from diffquant.verbs.checked import checked
from diffquant.verbs.notes import chosen_device, say, wrote

if TYPE_CHECKING:
    from diffquant.sweep.forecast import SweepForecast
    from diffquant.sweep.measured import MeasuredSweep

Granularities = Annotated[str | Sequence[str], kinds.Kind(str, "LIST", former="granularity")]
Recipes = Annotated[kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "FILE", repeats=True, former="recipe")]
Address = Annotated[str, kinds.Kind(str, "ADDRESS")]


@checked
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
    worker: bool = False,
    planned: "Callable[[SweepForecast], None] | None" = None,
    progress: Progress | None = None,
    **task_options: object,
) -> "MeasuredSweep":
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
        attention, device, device_map, offload_folder: as `generate` takes them.
        workers: number of processes, here or on the Ray cluster, which share the cores.
        devices: devices such as cuda:0,cuda:1, in place of `device`; a process each.
        ray: Ray cluster that measures; auto finds the one that runs here.
        worker: measure what no other `worker` has claimed, and leave; the last one writes the tables.
        planned: function called with the cells to measure, before anything is written; what it raises ends the run.
        progress: function called with the cells done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        All cells, those that were there included, with `table()` and `plot()`; none for a worker that leaves others
        measuring.

    Raises:
        DiffQuantError: what can be known before the first cell is wrong.
        FailedCellsError: some cells failed; the others are written, and the error's `result` has them all.
        KeyboardInterrupt: with a message that says how to go on.
    """
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.engines.choice import chosen_engine
    from diffquant.sweep.grid import SweepOptions
    from diffquant.sweep.measured import MeasuredSweep
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.result import SweepResult
    from diffquant.sweep.run import join_sweep, run_sweep

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

    def told(cells: "SweepForecast") -> None:
        if planned is not None:
            planned(cells)
        say(f"sweep: {cells.headline}")

    if worker:
        if workers is not None or devices or ray:
            raise UsageError(
                f"{spelled('worker')} is one process: leave out {spelled('workers')}, {spelled('devices')} and "
                f"{spelled('ray')}, and start more of it"
            )
        joined = join_sweep(paths(models), options, folder, shown, runtime_of, told)
        if joined is None:
            say("nothing is left to claim; whoever finishes last writes the tables")
        else:
            wrote([folder / "sweep.json"])
        result = joined or SweepResult([], {})
    else:
        options, engine = chosen_engine(options, workers, texts(devices), ray, say)
        result = run_sweep(paths(models), options, folder, shown, runtime_of, engine, told)
        wrote(write_outputs(result, folder))
    result.require_complete()
    return MeasuredSweep(result.cells, result.settings)
