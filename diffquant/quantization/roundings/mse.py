"""Rounding by the scales with the least squared error, with every weight at its nearest code."""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.numbers import absmax_scale, max_code, sharing_view, storable_scale
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
    view, _ = sharing_view(values, scheme.granularity, scheme.size)
    scale = fitted_scale(view, scheme.bits, dtype)
    return all_codes(view, scale, scheme.bits).reshape(values.shape), scale.reshape(len(values), -1)


def fitted_scale(values: Tensor, bits: int, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """The scale with the least squared error over all 2^b codes.

    It may clip, and its sign is such that the largest magnitude has the side with one code more.

    Args:
        values: [..., n] float32; the n share a scale.
        bits: 2 to 8.
        dtype: dtype of the stored scale.
        weights: weight of each square, [n]; alike by default.

    Returns:
        [..., 1].
    """
    largest = absmax_scale(values, bits, -1)
    largest = torch.where(values.amax(-1, keepdim=True) > -values.amin(-1, keepdim=True), -largest, largest)
    # Where squares overflow, no trial is better than absmax.
    best, least = storable(largest, bits, dtype), torch.full_like(largest, torch.inf)
    for share in (1 - trial / (10 * bits) for trial in range(_TRIALS)):
        scale = storable(largest * share, bits, dtype)
        rounded = _nearest(values, scale.float(), bits).mul_(scale.float())
        squares = rounded.sub_(values).square_()
        error = (squares if weights is None else squares.mul_(weights)).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def storable(scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The scale as `storable_scale` gives it, of either sign, and no larger than what the lowest code can multiply."""
    numbers = torch.finfo(dtype)
    limit = numbers.max / -lowest_code(bits) * (1 - numbers.eps)
    return storable_scale(scale.abs(), bits, dtype).clamp(max=limit).copysign(scale.to(dtype))


def all_codes(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Nearest codes int8 of values, the lowest one, which absmax leaves unused, included."""
    return _nearest(values, scale.float(), bits).to(torch.int8)


def lowest_code(bits: int) -> int:
    """The lowest code of b bits, one below the range that absmax uses."""
    return -(1 << (bits - 1))


def _nearest(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (values / scale).round_().clamp_(lowest_code(bits), max_code(bits))


class Mse(Rounding):
    """Rounding to the nearest code under the scales with the least squared error."""

    name = "mse"

    def prepare(
        self,
        source: Source | WeightSource,  # noqa: ARG002
        schemes: Mapping[str, Scheme],  # noqa: ARG002
        settings: RoundingSettings,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> Rounder:
        return Rounder(round_with_clipping)


register(Mse())
