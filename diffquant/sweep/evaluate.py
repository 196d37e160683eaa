"""One configuration of one model, measured now and kept nowhere."""

from pathlib import Path
from typing import Any

from diffquant.attention import check_backend
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import load
from diffquant.scheme import Recipe
from diffquant.source.ranges import check_taken
from diffquant.source.source import open_source
from diffquant.support.devices import resolve
from diffquant.support.progress import Progress, silent
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.tasks import make_tasks


def evaluate(
    path: Path, recipe: Recipe | None, options: SweepOptions, progress: Progress = silent
) -> dict[str, dict[str, Any]]:
    """Results by task.

    Args:
        recipe: what to simulate; a quantized checkpoint's own by default.
        options: tasks, items, text, dtype, device and scales; what concerns a grid is not looked at.

    Raises:
        DiffQuantError: the checkpoint, the tasks or their data cannot be read; all before the first item.
        NotFiredError: a layer did not quantize its logits.
    """
    check_backend(options.attention)
    tasks = make_tasks(options)
    source = open_source(path)
    tokenizer = source.tokenizer
    scales = next(iter(options.scales), None)
    model = load(source, recipe, resolve(options.dtype, options.device), options.device, scales=scales)
    check_taken(scales, [model.recipe])
    model.use_attention(options.attention)
    results = {task.name: task.run(TorchModel(model), tokenizer, None, progress) for task in tasks}
    model.require_fired()
    return results


def summary(results: dict[str, dict[str, Any]]) -> str:
    """One line a task: its scalar results."""
    return "\n".join(f"{task}: {_scalars(result)}" for task, result in results.items())


def _scalars(result: dict[str, Any]) -> str:
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float) and name != "score"}
    return ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
