"""The verb `plan`: whether a model fits, before anything is downloaded to memory or written."""

from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UsageError
from diffquant.support.spelling import spelled
from diffquant.verbs import kinds
from diffquant.verbs.checked import checked
from diffquant.verbs.hub import at_revision
from diffquant.verbs.recipes import chosen_recipe

if TYPE_CHECKING:
    from diffquant.planning import MemoryPlan

Memory = Annotated[str | int, kinds.Kind(str, "SIZE")]
Context = Annotated[int, kinds.Kind(int, "TOKENS", least=1)]
_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LEAST = 1000


@checked
def plan(
    model: kinds.Model,
    recipe: kinds.RecipeFile | None = None,
    *,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    residual: kinds.Residual | None = None,
    context: Context | None = None,
    batch: kinds.Count = 1,
    memory: Memory | None = None,
    revision: kinds.Name | None = None,
) -> "MemoryPlan":
    """Say what weights and KV cache take, and what fits.

        diffquant plan model --weights 4:g32 --kv 8 --context 32768 --batch 4 --memory 24G
        print(diffquant.plan("model", weights="4:g32", kv=8, context=32768, memory="24G"))

    It reads headers alone. A model whose packed weights are expanded, as on a processor, takes what plan says of 16.

    Args:
        model, recipe, preset, weights, kv, k, v, residual, revision: as `quantize` takes them.
        context: number of tokens of each sequence; by default all that the model was made for.
        batch: number of sequences at a time.
        memory: bytes that there are, such as 24G; by default those that this machine has free now.

    Returns:
        Bytes of weights, cache and work, and the longest context that fits.

    Raises:
        DiffQuantError: the checkpoint or the recipe is wrong.
    """
    from diffquant.planning import plan_memory
    from diffquant.source.source import open_source
    from diffquant.support.machine import free_memory

    wanted = chosen_recipe(recipe, preset, weights=weights, kv=kv, k=k, v=v, residual=residual)
    source = open_source(at_revision(model, revision))
    there = free_memory() if memory is None else _bytes(memory)
    where = "free on this machine" if memory is None else "as given"
    length = context or source.architecture.max_position_embeddings
    return plan_memory(source, wanted, length, batch, there, where)


def _bytes(memory: str | int) -> int:
    """A size as people write it: 24G, 512MB or a number of bytes.

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
        raise UsageError(f"{spelled('memory')} takes a size such as 24G, not {memory!r}")
    return size
