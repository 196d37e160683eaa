"""Quantization and its inverse in one step, as the expected value of what caches and logits compute."""

from torch import Tensor

from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.sharing import Sharing


def fake_quantize(x: Tensor, bits: int, granularity: str, size: int | None = None) -> Tensor:
    """x [..., rows, columns] read back from integers of `bits`, in its own dtype; a granularity by name and size."""
    integers = format_named(str(bits))
    view, dim = Sharing(granularity, size).view(x)
    scale = integers.scale(view, dim)
    return integers.decode(integers.codes(view, scale), scale).to(x.dtype).reshape(x.shape)
