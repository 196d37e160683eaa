"""Functions for simulated attention: rotations, and the formats of logits and softmax weights."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from diffquant.recipe.numbers.formats import NumberFormat


@lru_cache
def make_rotation_matrix(width: int) -> Tensor:
    """Return an orthogonal matrix, always the same for a width.

    If the width is a power of two, it is random signs times a Hadamard matrix; otherwise the Q factor of a random
    normal matrix.

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
    """Multiply heads x [..., d] by a matrix [d, d]; compute in the matrix's dtype and return the dtype of x."""
    return (x.to(matrix.dtype) @ matrix.to(x.device)).to(x.dtype)


# exp(-12) is 6e-6: logits further below the row maximum have no weight, and a finer scale above helps.
SHIFT_RANGE = 12.0


class NonPositiveIntegers(NumberFormat):
    """An integer format for values that are never positive: all levels are zero or negative."""

    def __init__(self, both_sides: NumberFormat) -> None:
        self.name = f"{both_sides.name} below zero"
        self.levels = tuple(range(-both_sides.interval_count, 1))

    @property
    def clip_limit(self) -> float:
        return self.interval_count + 0.5

    def scale_for_largest(self, largest: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the scale that maps the largest magnitude, limited to `SHIFT_RANGE`, to the lowest level.

        Where the largest magnitude is 0 the scale is 1.
        """
        scale = largest.clamp(max=SHIFT_RANGE) / self.interval_count
        return torch.where(scale == 0, 1.0, scale).to(dtype or scale.dtype)

    def round_to_absmax_levels_(self, ratio: Tensor) -> Tensor:
        return ratio.round_().clamp_(min=self.lowest)


def logit_format(number_format: NumberFormat, shift: bool) -> NumberFormat:
    """Return the format in which logits are rounded.

    With `shift`, the row's maximum has been subtracted, so the format has no positive levels.
    """
    return NonPositiveIntegers(number_format) if shift else number_format


def softmax_weight_scale(number_format: NumberFormat, pow2: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the scale [1] of unnormalized softmax weights, whose maximum is 1.

    With `pow2`, it is a power of two.
    """
    if pow2:
        return torch.full((1,), 2.0 ** -math.floor(math.log2(number_format.largest)), dtype=dtype)
    return number_format.scale_for_largest(torch.ones(1, dtype=dtype))
