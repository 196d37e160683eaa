"""The verb `sweep`: a grid of bit widths, measured and written."""

import logging
from collections.abc import Sequence
from pathlib import Path

from diffquant.export.targets import runtime_of
from diffquant.source.places import DeviceMap
from diffquant.support.progress import Progress, progress_for
from diffquant.sweep.engines.choice import chosen_engine
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.outputs import write_outputs
from diffquant.sweep.result import SweepResult
from diffquant.sweep.run import run_sweep
from diffquant.verbs.arguments import numbers, path_or_none, paths, task_values, texts


def sweep(
    models: Path | str | Sequence[Path | str],
    output: Path | str,
    tasks: str | Sequence[str] = "hellaswag",
    *,
    bits: str | Sequence[int] = (16, 8, 6, 4),
    targets: str | Sequence[str] = "logits",
    granularities: str | Sequence[str] = (),
    recipes: Path | str | Sequence[Path | str] = (),
    scales: Path | str | Sequence[Path | str] = (),
    dtype: str = "auto",
    attention: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    offload_folder: Path | str | None = None,
    workers: int | None = None,
    devices: str | Sequence[str] = (),
    ray: str | None = None,
    progress: Progress | None = None,
    **task_options: object,
) -> SweepResult:
    """Measure what each bit width costs, and write tables, plots and a report.

        diffquant.sweep(["needle-diff-v1", "needle-transformer"], "run", "needle", bits="16,8,4", limit=20)

    Cells that `output` holds already are not measured again, and other sweeps may write into it at the same time.

    Args:
        models: a checkpoint, or several, such as a Transformer beside its DIFF; exported folders.
        output: folder for cells, table, plots and report.
        tasks: names of tasks, such as "hellaswag,perplexity" or "needle:4:2".
        bits: widths, 2 to 8; 16 is always measured.
        targets: what is quantized, each alone: logits, qk, weights, kv, k, v.
        granularities: what shares one scale, such as "row,tensor,row:shift"; each target's default otherwise.
        recipes: YAML files of recipes to measure beside the grid.
        scales: files of calibrated ranges, for static schemes, one for each model.
        dtype: "auto" (bfloat16 where it is native, else float32), or a dtype's name.
        attention: name of an attention backend, or "auto".
        device: device that models run on; "auto" is CUDA where there is one, else the processor.
        device_map, offload_folder: places of a model that is larger than one device, as `load` takes them.
        workers: number of processes on this machine, or on the Ray cluster, which share the cells.
        devices: devices such as "cuda:0,cuda:1", in place of `device`; a process each.
        ray: address of a Ray cluster that measures; "auto" finds the one that runs on this machine.
        progress: function called with the cells done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        All cells, those that were there included.

    Raises:
        DiffQuantError: what can be known before the first cell is wrong.
        FailedCellsError: some cells failed; the others are written.
        KeyboardInterrupt: with a message that says how to go on.
    """
    options = SweepOptions(
        tasks=texts(tasks),
        bits=numbers("bits", bits),
        targets=texts(targets),
        granularities=texts(granularities),
        recipes=paths(recipes),
        scales=paths(scales),
        task_options=task_values(task_options),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=path_or_none(offload_folder),
    )
    options, engine = chosen_engine(options, workers, texts(devices), ray, logging.getLogger(__name__).info)
    result = run_sweep(paths(models), options, Path(output), progress or progress_for("sweep"), runtime_of, engine)
    write_outputs(result, Path(output))
    result.require_complete()
    return result
