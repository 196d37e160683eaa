"""Quantization and its inverse in one step, as the expected value of what caches and logits compute."""

from torch import Tensor

from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.sharing import Granularity


def fake_quantize(x: Tensor, bits: int, granularity: str, size: int | None = None) -> Tensor:
    """x [..., rows, columns] read back from integers of `bits`, in its own dtype; a granularity by name and size."""
    integers = format_named(str(bits))
    view, dim = Granularity(granularity, size).view(x)
    scale = integers.compute_scale(view, dim)
    return integers.decode(integers.encode(view, scale), scale).to(x.dtype).reshape(x.shape)
