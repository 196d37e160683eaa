"""What simulated attention does to its operands: rotations, and the formats of logits and softmax weights."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from diffquant.recipe.numbers.formats import NumberFormat


@lru_cache
def rotation(width: int) -> Tensor:
    """Return an orthogonal matrix, the same one for a width wherever it is made.

    Random signs and then a Hadamard matrix where the width is a power of two; else the orthogonal factor of a matrix of
    random normal numbers.

    Returns:
        [width, width] float64.

    Source: the randomized Hadamard transform of Ashkboos et al., QuaRot, arXiv 2404.00456, section 3.
    """
    generator = torch.Generator().manual_seed(width)
    if width & (width - 1):
        normal = torch.randn(width, width, dtype=torch.float64, generator=generator)
        orthogonal: Tensor = torch.linalg.qr(normal).Q
        return orthogonal
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (width, 1), generator=generator) * 2 - 1
    matrix: Tensor = signs * hadamard * width**-0.5
    return matrix


def rotate_by(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply heads [..., d] by a matrix [d, d] in the matrix's dtype; the result has the heads' dtype."""
    return (x.to(matrix.dtype) @ matrix.to(x.device)).to(x.dtype)


# exp(-12) is 6e-6: what lies further below the row maximum weighs nothing, and a finer scale above pays.
SHIFT_RANGE = 12.0


class OneSided(NumberFormat):
    """A format of even steps whose levels all lie at zero or below, for values that do."""

    def __init__(self, both_sides: NumberFormat) -> None:
        self.name = f"{both_sides.name} below zero"
        self.levels = tuple(range(-both_sides.steps, 1))

    @property
    def reach(self) -> float:
        return self.steps + 0.5

    def scale_of(self, largest: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Scale that maps a largest magnitude, `SHIFT_RANGE` at most, to the lowest level; 1 where it is 0."""
        scale = largest.clamp(max=SHIFT_RANGE) / self.steps
        return torch.where(scale == 0, 1.0, scale).to(dtype or scale.dtype)

    def round_to_levels_(self, ratio: Tensor) -> Tensor:
        return ratio.round_().clamp_(min=self.lowest)


def logit_format(number_format: NumberFormat, shift: bool) -> NumberFormat:
    """Format in which logits are rounded; with `shift` they are at most 0, since their row's maximum was subtracted."""
    return OneSided(number_format) if shift else number_format


def weight_scale(number_format: NumberFormat, pow2: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale [1] of a row of unnormalized softmax weights, whose largest is always 1; with `pow2` a power of two."""
    if pow2:
        return torch.full((1,), 2.0 ** -math.floor(math.log2(number_format.largest)), dtype=dtype)
    return number_format.scale_of(torch.ones(1, dtype=dtype))
