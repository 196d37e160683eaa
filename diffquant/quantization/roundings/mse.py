"""Rounding by the scales with the least squared error, with every weight at its nearest code."""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.numbers.absmax import storable_scale
from diffquant.numbers.formats import NumberFormat
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.recipe import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress

# Number of scales that are tried; the fewer the bits, the more clipping gains.
_TRIALS = 20


def round_with_clipping(_name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, in] of some rows under the scales with the least squared error."""
    view, _ = scheme.sharing.view(values)
    scale = fitted_scale(view, scheme.format, dtype)
    return all_codes(view, scale, scheme.format).reshape(values.shape), scale.reshape(len(values), -1)


def fitted_scale(
    values: Tensor, number_format: NumberFormat, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:
    """The scale with the least squared error over all codes, of integers those below the range of absmax included.

    It may clip, and its sign is such that the largest magnitude lies where there is one code more, if there is.

    Args:
        values: [..., n] float32; the n share a scale.
        number_format: even format of the codes.
        dtype: dtype of the stored scale.
        weights: weight of each square, [n]; alike by default.

    Returns:
        [..., 1].
    """
    largest = number_format.scale(values, -1)
    largest = torch.where(values.amax(-1, keepdim=True) > -values.amin(-1, keepdim=True), -largest, largest)
    # Where squares overflow, no trial is better than absmax.
    best, least = storable(largest, number_format, dtype), torch.full_like(largest, torch.inf)
    for share in (1 - trial / (10 * number_format.code_width) for trial in range(_TRIALS)):
        scale = storable(largest * share, number_format, dtype)
        rounded = _nearest(values, scale.float(), number_format).mul_(scale.float())
        squares = rounded.sub_(values).square_()
        error = (squares if weights is None else squares.mul_(weights)).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def storable(scale: Tensor, number_format: NumberFormat, dtype: torch.dtype) -> Tensor:
    """The scale as `storable_scale` gives it, of either sign, and no larger than what the lowest code can multiply."""
    numbers = torch.finfo(dtype)
    limit = numbers.max / -number_format.lowest * (1 - numbers.eps)
    return storable_scale(scale.abs(), number_format.largest, dtype).clamp(max=limit).copysign(scale.to(dtype))


def all_codes(values: Tensor, scale: Tensor, number_format: NumberFormat) -> Tensor:
    """Nearest codes int8 of values, the lowest one, which absmax leaves unused, included."""
    return _nearest(values, scale.float(), number_format).to(torch.int8)


def _nearest(values: Tensor, scale: Tensor, number_format: NumberFormat) -> Tensor:
    return (values / scale).round_().clamp_(number_format.lowest, number_format.largest)


class Mse(Rounding):
    """Rounding to the nearest code under the scales with the least squared error."""

    name = "mse"
    needs_even_levels = True

    def prepare(
        self,
        source: Source | WeightSource,  # noqa: ARG002
        schemes: Mapping[str, Scheme],  # noqa: ARG002
        settings: RoundingSettings,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> Rounder:
        return Rounder(round_with_clipping)


register(Mse())
