"""Rounding by the scales with the least squared error, with every weight at its nearest code."""

from typing import Any

import torch
from torch import Tensor

from diffquant.numbers.formats import NumberFormat
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.scheme import Scheme

# Number of scales that are tried; the fewer the bits, the more clipping gains.
_TRIALS = 20


def round_with_clipping(_name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, in] of some rows under the scales with the least squared error."""
    view, _ = scheme.sharing.view(values)
    scale = fitted_scale(view, scheme.format, dtype)
    levels = all_levels(view, scale, scheme.format).reshape(values.shape)
    return level_codes(levels, scheme.format), scale.reshape(len(values), -1)


def fitted_scale(
    values: Tensor, number_format: NumberFormat, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:
    """The scale with the least squared error over all codes, of integers those below the range of absmax included.

    It may clip, and its sign is such that the largest magnitude lies where there is one code more, if there is.

    Args:
        values: [..., n] float32; the n share a scale.
        number_format: format of the codes.
        dtype: dtype of the stored scale.
        weights: weight of each square, [n]; alike by default.

    Returns:
        [..., 1].
    """
    largest = number_format.scale(values, -1)
    if number_format.is_even:
        largest = torch.where(values.amax(-1, keepdim=True) > -values.amin(-1, keepdim=True), -largest, largest)
    # Where squares overflow, no trial is better than absmax.
    best, least = number_format.storable(largest, dtype), torch.full_like(largest, torch.inf)
    shares = number_format.trials or [1 - trial / (10 * number_format.code_width) for trial in range(_TRIALS)]
    for share in shares:
        scale = number_format.storable(largest * share, dtype)
        rounded = all_levels(values, scale, number_format).mul_(scale.float())
        squares = rounded.sub_(values).square_()
        error = (squares if weights is None else squares.mul_(weights)).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def all_levels(values: Tensor, scale: Tensor, number_format: NumberFormat) -> Tensor:
    """Nearest levels of values over their scale, the lowest one, which absmax leaves unused, included."""
    return number_format.nearest_(values / scale.float())


def level_codes(levels: Tensor, number_format: NumberFormat) -> Tensor:
    """Codes int8 of numbers that are levels of a format."""
    if number_format.is_even:
        return levels.to(torch.int8, memory_format=torch.contiguous_format)
    return number_format.codes(levels, levels.new_ones(()))


class Mse(Rounding):
    """Rounding to the nearest code under the scales with the least squared error."""

    name = "mse"

    def prepare(self, *_: Any, **__: Any) -> Rounder:
        return Rounder(round_with_clipping)


register(Mse())
