"""The verb `evaluate`: one configuration of one model, measured now."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.evals.task_result import TaskResult
from diffquant.export.targets import runtime_of
from diffquant.recipe import Recipe, RecipeLike
from diffquant.source.places import DeviceMap
from diffquant.support.progress import Progress, progress_for
from diffquant.sweep.evaluate import evaluate as measure
from diffquant.sweep.grid import SweepOptions
from diffquant.verbs.arguments import path_or_none, paths, task_values, texts


def evaluate(
    model: Path | str,
    tasks: str | Sequence[str] = "hellaswag",
    recipe: RecipeLike | None = None,
    *,
    scales: Path | str | None = None,
    dtype: str = "auto",
    attention: str = "auto",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    offload_folder: Path | str | None = None,
    progress: Progress | None = None,
    **task_options: object,
) -> dict[str, TaskResult]:
    """Measure one configuration of a model.

        diffquant.evaluate("checkpoint", "perplexity", {"kv": 8}, characters=4096)["perplexity"].score

    Args:
        model: checkpoint, plain or quantized, or an exported folder, which is measured as it is.
        tasks: names of tasks, such as "hellaswag,perplexity" or "needle:4:2".
        recipe: recipe to simulate, as `Recipe.parse` takes it; a quantized checkpoint's own by default.
        scales: file of calibrated ranges, for static schemes.
        dtype: "auto" (bfloat16 where it is native, else float32), or a dtype's name.
        attention: name of an attention backend, or "auto".
        device: device that the model runs on; "auto" is CUDA where there is one, else the processor.
        device_map, offload_folder: places of a model that is larger than one device, as `load` takes them.
        progress: function called with the items done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        Results by the task's name.

    Raises:
        DiffQuantError: the checkpoint, the recipe, the tasks or their data cannot be read; all before the first item.
    """
    options = SweepOptions(
        tasks=texts(tasks),
        scales=() if scales is None else paths(scales),
        task_options=task_values(task_options),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=path_or_none(offload_folder),
    )
    wanted = None if recipe is None else Recipe.parse(recipe)
    return measure(Path(model), wanted, options, progress or progress_for("evaluate"), runtime_of)
