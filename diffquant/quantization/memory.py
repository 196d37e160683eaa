"""Estimates from a checkpoint's headers the memory that its model needs."""

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffquant.checkpoints.source import Source
from diffquant.model.windowed_cache import create_storage
from diffquant.quantization.loading import resolve_recipe
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.reports.tables import format_size
from diffquant.support.terminal import PrintableResult, one_line

# Bytes per entry of vocabulary logits and of recurrent states, which are float32.
_FLOAT32 = 4
# Longest sequence that is tried. A cache with scales per block lists the blocks, even on the meta device.
_LONGEST = 2**24


@dataclass(frozen=True, repr=False)
class MemoryPlan(PrintableResult):
    """Bytes that a model needs while it generates.

    Attributes:
        model: path of the checkpoint.
        recipe: recipe that the plan is for; by default the checkpoint's recorded recipe.
        context: number of tokens per sequence.
        batch: number of sequences.
        weights: bytes of all tensors as stored, scales included.
        cache: bytes of the KV cache at the full context, and of recurrent states.
        work: bytes of temporaries in a decoding step: one layer's dequantized keys and values, and vocabulary logits.
        memory: available bytes.
        where: short description of the memory, such as the device.
        longest: largest number of tokens per sequence that fits, of 2^24 at most; 0 if none does.
        limit: maximum number of positions of the model (max_position_embeddings).
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
        """Bytes of weights, cache and temporaries."""
        return self.weights + self.cache + self.work

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": self.recipe.to_dict(), "peak": self.peak, "fits": self.fits}

    def __str__(self) -> str:
        what = "fits" if self.fits else "DOES NOT FIT"
        activations = self.recipe.rounding_texts("activations")
        inputs = f", activations {' or '.join(activations)}" if activations else ""
        without = "the weights alone do not fit"
        if self.weights <= self.memory:
            without = "no token fits in addition to the weights"
        longest = f"up to {self.longest:,} tokens fit" if self.longest else without
        beyond = f", more than its {self.limit:,} positions" if self.longest > self.limit else ""
        return "\n".join(
            [
                f"{what}: {one_line(self.model)}",
                f"  takes    {format_size(self.peak):>12}  of {format_size(self.memory)}, {self.where}",
                f"  weights  {format_size(self.weights):>12}  {self.recipe.weights}{inputs}",
                f"  cache    {format_size(self.cache):>12}  k {self.recipe.k}, v {self.recipe.v}; "
                f"{self.batch} x {self.context:,} tokens",
                f"  work     {format_size(self.work):>12}  one layer dequantized, and logits",
                f"with {self.batch} {'sequence' if self.batch == 1 else 'sequences'}, {longest}{beyond}",
            ]
        )


def plan_memory(source: Source, recipe: Recipe | None, context: int, batch: int, memory: int, where: str) -> MemoryPlan:
    """Compute the memory that a model needs while it generates, without reading a tensor.

    The cache's size is measured on a `PackedCache` on torch's meta device, which allocates nothing. The weights have
    the size that `quantize` would write, or that of the checkpoint if it is quantized already.

    Args:
        memory: available bytes.
        where: short description of that memory.

    Raises:
        DiffQuantError: the recipe does not fit the checkpoint.
    """
    if source.packed:
        recipe, _ = resolve_recipe(source, recipe)
        weights = source.checkpoint.nbytes
    else:
        plan = plan_quantization(source, recipe or Recipe())
        recipe, weights = plan.recipe, plan.bytes_after

    def count_bytes(tokens: int) -> tuple[int, int]:
        return _cache_bytes(source, recipe, tokens, batch), _work_bytes(source, tokens, batch)

    longest = bisect_right(range(1, _LONGEST + 1), memory - weights, key=lambda tokens: sum(count_bytes(tokens)))
    cache, work = count_bytes(context)
    limit = source.architecture.max_position_embeddings
    return MemoryPlan(str(source.path), recipe, context, batch, weights, cache, work, memory, where, longest, limit)


def _cache_bytes(source: Source, recipe: Recipe, tokens: int, batch: int) -> int:
    """Return the bytes of all layers' KV cache after this many tokens, and of recurrent states."""
    architecture, total = source.architecture, 0
    alike: dict[str, int] = {}
    for layer, rows in architecture.cached_shapes.items():
        key = repr((rows, recipe.at_layer(layer)))
        if key not in alike:
            ranges = {
                f"layers.{layer}.{target}": torch.ones(shape, device="meta")
                for target, shape in (("k", rows.keys), ("v", rows.values))
            }
            storage = create_storage(rows, layer, recipe, ranges)
            storage.update(*(_states(shape, tokens, batch, source.dtype) for shape in (rows.keys, rows.values)))
            alike[key] = storage.nbytes
        total += alike[key]
    states = (
        block.cached_shapes
        for blocks in architecture.layers
        for block in blocks.values()
        if isinstance(block.cached_shapes, tuple)
    )
    return total + sum(_FLOAT32 * batch * math.prod(shape) for shapes in states for shape in shapes)


def _states(shape: tuple[int, int], tokens: int, batch: int, dtype: torch.dtype) -> torch.Tensor:
    heads, width = shape
    return torch.empty(batch, heads, tokens, width, dtype=dtype, device="meta")


def _work_bytes(source: Source, tokens: int, batch: int) -> int:
    """Return the bytes of the largest layer's dequantized keys and values, and of a step's vocabulary logits."""
    rows = source.architecture.cached_shapes.values()
    entries = max((math.prod(each.keys) + math.prod(each.values) for each in rows), default=0)
    return batch * (tokens * entries * source.dtype.itemsize + source.architecture.vocab_size * _FLOAT32)
