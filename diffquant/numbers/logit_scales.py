"""Scales of simulated low-bit logits and softmax weights."""

import math

import torch
from torch import Tensor

from diffquant.numbers.formats import NumberFormat

# exp(-12) is 6e-6: what lies further below the row maximum weighs nothing, and a finer scale above pays.
SHIFT_RANGE = 12.0


def logit_scale(magnitude: Tensor, number_format: NumberFormat, shift: bool) -> Tensor:
    """Scale that maps a largest magnitude to the largest level; 1 where it is 0.

    Args:
        magnitude: largest |logit| of the entries that share a scale, any shape.
        number_format: format of the logits' codes.
        shift: whether all logits are at most 0, since their row's maximum was subtracted: every code then stands for
            one.
    """
    if not shift:
        return number_format.scale_of(magnitude)
    scale = magnitude.clamp(max=SHIFT_RANGE) / number_format.steps
    return torch.where(scale == 0, 1.0, scale)


def weight_scale(number_format: NumberFormat, pow2: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale [1] of a row of unnormalized softmax weights, whose largest is always 1; with `pow2` a power of two."""
    if pow2:
        return torch.full((1,), 2.0 ** -math.floor(math.log2(number_format.largest)), dtype=dtype)
    return number_format.scale_of(torch.ones(1, dtype=dtype))
