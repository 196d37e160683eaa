"""Formats and scales of simulated low-bit logits and softmax weights."""

import math

import torch
from torch import Tensor

from diffquant.numbers.formats import NumberFormat

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

    def rounded_(self, ratio: Tensor) -> Tensor:
        return ratio.round_().clamp_(min=self.lowest)


def logit_format(number_format: NumberFormat, shift: bool) -> NumberFormat:
    """Format in which logits are rounded; with `shift` they are at most 0, since their row's maximum was subtracted."""
    return OneSided(number_format) if shift else number_format


def weight_scale(number_format: NumberFormat, pow2: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale [1] of a row of unnormalized softmax weights, whose largest is always 1; with `pow2` a power of two."""
    if pow2:
        return torch.full((1,), 2.0 ** -math.floor(math.log2(number_format.largest)), dtype=dtype)
    return number_format.scale_of(torch.ones(1, dtype=dtype))
