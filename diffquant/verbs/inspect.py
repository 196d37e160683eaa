"""The verbs `inspect` and `plan`: what a checkpoint is, and what it would take under a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UnknownModelTypeError, UsageError
from diffquant.recipe import Recipe
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

if TYPE_CHECKING:
    from diffquant.quantization.inspection import Inspection, WeightInspection
    from diffquant.quantization.planning import MemoryPlan


@check_arguments
def inspect(model: kinds.PathModel) -> "Inspection | WeightInspection":
    """Say what a checkpoint is: its kind, λ, and sizes.

        diffquant inspect model
        print(diffquant.inspect("model"))

    It reads only headers and λ parameters, and gives sizes at several widths.

    Args:
        model: as `quantize` takes it.

    Returns:
        What is known of a model, or of the weights of an architecture that is not known.

    Raises:
        CheckpointError: it is damaged or incomplete.
    """
    from diffquant.quantization.inspection import inspect_checkpoint, inspect_weights

    path = Path(model)
    try:
        return inspect_checkpoint(path)
    except UnknownModelTypeError:
        return inspect_weights(path)


Memory = Annotated[str | int, kinds.Kind(str, "SIZE")]
Context = Annotated[int, kinds.Kind(int, "TOKENS", least=1)]
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LEAST = 1000


@check_arguments
def plan(
    model: kinds.Model,
    recipe: kinds.RecipeFile | None = None,
    *,
    context: Context | None = None,
    batch: kinds.Count = 1,
    memory: Memory | None = None,
) -> "MemoryPlan":
    """Say what weights and KV cache take, and what fits.

        diffquant plan model --weights 4:g32 --kv 8 --context 32768 --batch 4 --memory 24G
        print(diffquant.plan("model", {"weights": "4:g32", "kv": 8}, context=32768, memory="24G"))

    It reads headers alone. A model whose packed weights are expanded, as on a processor, takes what plan says of 16.

    Args:
        model, recipe: as `quantize` takes them.
        context: number of tokens of each sequence; by default all that the model was made for.
        batch: number of sequences at a time.
        memory: bytes that there are, such as 24G; by default those that this machine has free now.

    Returns:
        Bytes of weights, cache and work, and the longest context that fits.

    Raises:
        DiffQuantError: the checkpoint or the recipe is wrong.
    """
    from diffquant.checkpoints.source import open_source
    from diffquant.quantization.planning import plan_memory
    from diffquant.support.machine import free_memory

    wanted = None if recipe is None else Recipe.parse(recipe)
    source = open_source(model)
    there = free_memory() if memory is None else _bytes(memory)
    where = "free on this machine" if memory is None else "as given"
    length = context or source.architecture.max_position_embeddings
    return plan_memory(source, wanted, length, batch, there, where)


def _bytes(memory: str | int) -> int:
    """Read a size as people write it: 24G, 512MB or a number of bytes.

    Raises:
        UsageError: it is none.
    """
    text = str(memory).upper().removesuffix("B")
    number, factor = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    # A bare number is meant to be of gigabytes, and would be of bytes.
    if size < _LEAST:
        raise UsageError(f"{option_name('memory')} takes a size such as 24G, not {memory!r}")
    return size
