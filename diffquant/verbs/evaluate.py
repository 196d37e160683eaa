"""The verb `evaluate`: one configuration of one model, measured now."""

from typing import TYPE_CHECKING

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import path_or_none, paths, task_values, texts
from diffquant.verbs.checked import checked
from diffquant.verbs.hub import at_revision
from diffquant.verbs.notes import chosen_device
from diffquant.verbs.recipes import chosen_recipe

if TYPE_CHECKING:
    from diffquant.evals.task_result import TaskResult


@checked
def evaluate(
    model: kinds.PathModel,
    tasks: kinds.Tasks = "hellaswag",
    recipe: kinds.RecipeFile | None = None,
    *,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    logits: kinds.Scheme | None = None,
    qk: kinds.Scheme | None = None,
    p: kinds.Scheme | None = None,
    pv: kinds.Scheme | None = None,
    like: kinds.Kernel | None = None,
    residual: kinds.Residual | None = None,
    overrides: kinds.Overrides = (),
    scales: kinds.File | None = None,
    dtype: kinds.Name = "auto",
    attention: kinds.Name = "auto",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    revision: kinds.Name | None = None,
    progress: Progress | None = None,
    **task_options: object,
) -> "dict[str, TaskResult]":
    """Measure one configuration of one model.

        diffquant eval model-4bit --tasks perplexity
        diffquant.evaluate("model", "perplexity", {"kv": 8}, characters=4096)["perplexity"].score

    A quantized checkpoint runs under its own recipe by default, and an exported folder as it is.

    Args:
        model, revision: as `quantize` takes them.
        tasks: tasks, separated by commas.
        recipe, preset, weights, kv, k, v, logits, qk, p, pv, like, residual, overrides: as `quantize` takes them.
        dtype: as `search` takes it.
        scales, attention, device, device_map, offload_folder: as `generate` takes them.
        progress: function called with the items done; by default a line on a terminal, one per minute in a log.
        task_options: options of the tasks, such as limit=100 or lengths="64,128".

    Returns:
        Results by the task's name.

    Raises:
        DiffQuantError: the checkpoint, the recipe, the tasks or their data cannot be read; all before the first item.
    """
    from diffquant.export.targets import runtime_of
    from diffquant.sweep.evaluate import evaluate as measure
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=texts(tasks),
        scales=() if scales is None else paths(scales),
        task_options=task_values(task_options, evaluate),
        dtype=dtype,
        attention=attention,
        device=device,
        device_map=device_map,
        offload_folder=path_or_none(offload_folder),
    )
    chosen_device(device)
    wanted = chosen_recipe(
        recipe,
        preset,
        weights=weights,
        kv=kv,
        k=k,
        v=v,
        logits=logits,
        qk=qk,
        p=p,
        pv=pv,
        like=like,
        residual=residual,
        overrides=overrides,
    )
    return measure(at_revision(model, revision), wanted, options, progress or progress_for("eval"), runtime_of)
