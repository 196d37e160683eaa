"""Numbers in blocks that share a scale, and what a number format makes of them."""

import torch
from torch import Tensor

from diffquant.recipe.numbers.formats import NumberFormat


def blocks(width: int, scale: float = 1.0, count: int = 512) -> Tensor:
    """Blocks of normal numbers whose sizes differ by powers of ten; one is all zeros, one holds one number alone."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(count, width, generator=generator) * 10.0 ** torch.linspace(-4, 2, count)[:, None] * scale
    x[3], x[5] = 0, 0
    x[5, 1] = -7.0
    return x


def decoded(number_format: NumberFormat, x: Tensor, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Values read back, their codes and their scales."""
    scale = number_format.compute_scale(x, dim)
    codes = number_format.encode(x, scale)
    return number_format.decode(codes, scale), codes, scale
