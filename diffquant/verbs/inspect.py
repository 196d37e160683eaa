"""The verbs `inspect` and `plan`: what a checkpoint contains, and how much memory it needs under a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.recipe import Recipe
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments

if TYPE_CHECKING:
    from diffquant.quantization.inspection import Inspection, WeightInspection
    from diffquant.quantization.memory import MemoryPlan


@check_arguments
def inspect(model: kinds.PathModel) -> "Inspection | WeightInspection":
    """Describe a checkpoint: its kind, λ, and sizes.

        diffquant inspect model
        print(diffquant.inspect("model"))

    Reads only headers and λ parameters, and shows sizes at several bit widths.

    Args:
        model: see `quantize`.

    Returns:
        A description of the model, or of the weights if the architecture is unknown.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
    """
    from diffquant.quantization.inspection import inspect_checkpoint, inspect_weights

    path = Path(model)
    try:
        return inspect_checkpoint(path)
    except UnknownModelTypeError:
        return inspect_weights(path)


Memory = Annotated[str | int, kinds.Kind(str, "SIZE")]
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LEAST_BYTES = 1000


@check_arguments
def plan(
    model: kinds.Model,
    recipe: kinds.RecipeFile | None = None,
    *,
    context: kinds.Context | None = None,
    batch: kinds.Count = 1,
    memory: Memory | None = None,
) -> "MemoryPlan":
    """Show how much memory weights and KV cache need.

        diffquant plan model --weights 4:g32 --kv 8 --context 32768 --batch 4 --memory 24G
        print(diffquant.plan("model", {"weights": "4:g32", "kv": 8}, context=32768, memory="24G"))

    Reads only headers. On a CPU packed weights are expanded, so a model needs as much memory as at 16 bits.

    Args:
        model, recipe: see `quantize`.
        context: number of tokens in each sequence; by default the model's maximum.
        batch: number of concurrent sequences.
        memory: available memory, such as 24G; by default this machine's free memory.

    Returns:
        Bytes for weights, cache and activations, and the longest context that fits.

    Raises:
        DiffQuantError: the checkpoint or the recipe cannot be used.
    """
    wanted = None if recipe is None else Recipe.parse(recipe)
    from diffquant.checkpoints.source import open_source
    from diffquant.quantization.memory import plan_memory
    from diffquant.support.machine import available_memory

    source = open_source(model)
    available = available_memory() if memory is None else _parse_size(memory)
    where = "free on this machine" if memory is None else "as given"
    length = context or source.architecture.max_position_embeddings
    return plan_memory(source, wanted, length, batch, available, where)


def _parse_size(memory: str | int) -> int:
    """Return the number of bytes of a size such as 24G, 512MB or 2000000000.

    Raises:
        UsageError: the text is not a size.
    """
    text = str(memory).upper().removesuffix("B")
    number, factor = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    # A number without a unit would be bytes, but the user probably means gigabytes.
    if size < _LEAST_BYTES:
        raise UsageError(f"{option_name('memory')} takes a size such as 24G, not {memory!r}")
    return size
