"""Memory that a model takes under a recipe, from the headers of its checkpoint alone: the verb `plan`."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffquant.loading import recipe_of_run
from diffquant.model.windowed_cache import storage_of
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.report.tables import megabytes
from diffquant.source.source import Source
from diffquant.support.escaping import one_line
from diffquant.support.readable import Readable

# Vocabulary logits and the states of a layer that is summed wait in float32.
_FLOAT32 = 4


@dataclass(frozen=True, repr=False)
class MemoryPlan(Readable):
    """Bytes that a model takes while it generates.

    Attributes:
        model: checkpoint that was looked at.
        recipe: recipe that was planned, or the checkpoint's own.
        context: number of tokens of each sequence.
        batch: number of sequences.
        weights: bytes of all tensors as they are stored, packed ones with their scales.
        cache: bytes of the KV cache, and of recurrent states, when it holds the context.
        work: bytes beside them in a step: one layer's keys and values as they are read back, and vocabulary logits.
        memory: bytes that there are.
        where: what has them, in a few words.
        longest: largest number of tokens of each sequence that fits; 0 where not even one does.
        limit: number of positions that the model was made for.
    """

    model: str
    recipe: Recipe
    context: int
    batch: int
    weights: int
    cache: int
    work: int
    memory: int
    where: str
    longest: int
    limit: int

    @property
    def peak(self) -> int:
        """Bytes of all three."""
        return self.weights + self.cache + self.work

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": self.recipe.to_dict(), "peak": self.peak, "fits": self.fits}

    def __str__(self) -> str:
        what = "fits" if self.fits else "DOES NOT FIT"
        without = "no token fits beside the weights" if self.weights <= self.memory else "the weights alone do not fit"
        longest = f"up to {self.longest:,} tokens fit" if self.longest else without
        beyond = f", more than its {self.limit:,} positions" if self.longest > self.limit else ""
        return "\n".join(
            [
                f"{what}: {one_line(self.model)}",
                f"  takes    {megabytes(self.peak):>12}  of {megabytes(self.memory)}, {self.where}",
                f"  weights  {megabytes(self.weights):>12}  {self.recipe.weights}",
                f"  cache    {megabytes(self.cache):>12}  k {self.recipe.k}, v {self.recipe.v}; "
                f"{self.batch} x {self.context:,} tokens",
                f"  work     {megabytes(self.work):>12}  one layer read back, and logits",
                f"with {self.batch} {'sequence' if self.batch == 1 else 'sequences'}, {longest}{beyond}",
            ]
        )


def plan_memory(source: Source, recipe: Recipe | None, context: int, batch: int, memory: int, where: str) -> MemoryPlan:
    """A model's memory, computed without reading a tensor.

    The cache is `PackedCache`'s own, filled with tensors that have shapes and no data, and the weights are those of
    `quantize`'s plan, or of the checkpoint where it is quantized already.

    Raises:
        DiffQuantError: the recipe does not fit the checkpoint.
    """
    if source.packed:
        recipe, _ = recipe_of_run(source, recipe)
        weights = source.checkpoint.nbytes
    else:
        plan = plan_quantization(source, recipe or Recipe())
        recipe, weights = plan.recipe, plan.bytes_after

    def needed(tokens: int) -> tuple[int, int]:
        return _cache_bytes(source, recipe, tokens, batch), _work_bytes(source, tokens, batch)

    room = memory - weights
    longest, beyond = 0, 1
    while sum(needed(beyond)) <= room and beyond < 2**40:
        longest, beyond = beyond, 2 * beyond
    while beyond - longest > 1:
        middle = (longest + beyond) // 2
        longest, beyond = (middle, beyond) if sum(needed(middle)) <= room else (longest, middle)
    cache, work = needed(context)
    limit = source.architecture.max_position_embeddings
    return MemoryPlan(str(source.path), recipe, context, batch, weights, cache, work, memory, where, longest, limit)


def _cache_bytes(source: Source, recipe: Recipe, tokens: int, batch: int) -> int:
    """Bytes of all layers' cache after this many tokens, and of states that do not grow."""
    architecture, total = source.architecture, 0
    alike: dict[Any, int] = {}
    for layer, rows in architecture.token_rows.items():
        kind = (rows, recipe.at_layer(layer))
        key = repr(kind)
        if key not in alike:
            ranges = {
                f"layers.{layer}.{target}": torch.ones(shape, device="meta")
                for target, shape in (("k", rows.keys), ("v", rows.values))
            }
            storage = storage_of(rows, layer, recipe, ranges)
            storage.update(*(_states(shape, tokens, batch, source.dtype) for shape in (rows.keys, rows.values)))
            alike[key] = storage.nbytes
        total += alike[key]
    states = (
        block.stored for blocks in architecture.layers for block in blocks.values() if isinstance(block.stored, tuple)
    )
    return total + sum(_FLOAT32 * batch * math.prod(shape) for shapes in states for shape in shapes)


def _states(shape: tuple[int, int], tokens: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    heads, width = shape
    return torch.empty(batch, heads, tokens, width, dtype=dtype, device="meta")


def _work_bytes(source: Source, tokens: int, batch: int) -> int:
    """Bytes of the largest layer's keys and values as attention reads them, and of the logits of a step."""
    rows = source.architecture.token_rows.values()
    entries = max((math.prod(each.keys) + math.prod(each.values) for each in rows), default=0)
    return batch * (tokens * entries * source.dtype.itemsize + source.architecture.vocab_size * _FLOAT32)
