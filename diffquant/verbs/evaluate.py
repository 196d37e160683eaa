"""The verb `evaluate`: measures one model in one configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.recipe import Recipe
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, read_task_options, split_texts, to_path, to_paths
from diffquant.verbs.notes import choose_device

if TYPE_CHECKING:
    from diffquant.measure.results import TaskResult


@check_arguments
def evaluate(
    model: kinds.PathModel,
    tasks: kinds.Tasks = "hellaswag",
    recipe: kinds.RecipeFile | None = None,
    *,
    scales: kinds.File | None = None,
    dtype: kinds.Name = "auto",
    attention: kinds.Name = "auto",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    progress: Progress | None = None,
    **task_options: object,
) -> "dict[str, TaskResult]":
    """Measure one configuration of one model.

        diffquant eval model-4bit --tasks perplexity
        diffquant.evaluate("model", "perplexity", {"kv": 8})["perplexity"].details["perplexity"]

    A quantized checkpoint uses its recorded recipe by default. An exported folder takes no recipe.

    Args:
        model: see `quantize`.
        tasks: tasks, separated by commas.
        recipe: see `quantize`.
        dtype: see `search`.
        scales, attention, device, device_map, offload_folder: see `generate`.
        progress: function called with the items done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        Results by task name.

    Raises:
        DiffQuantError: the checkpoint, the recipe, a task or its data cannot be read; raised before the first item.
    """
    from diffquant.measure.sweep.grid import SweepOptions

    wanted = None if recipe is None else Recipe.parse(recipe)
    options = SweepOptions(
        tasks=split_texts(tasks),
        scales=() if scales is None else to_paths(scales),
        task_options=read_task_options(task_options, evaluate),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=to_path(offload_folder),
    )
    # Imported after the options are checked, since these import torch.
    from diffquant.measure.sweep.run import evaluate as measure
    from diffquant.onnx.targets import runtime_of

    choose_device(device)
    return measure(Path(model), wanted, options, progress or progress_for("eval"), runtime_of)
