"""Round-to-nearest with absmax scales (`nearest`) or with scales of least squared error (`mse`)."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import weight_codes, weight_scale
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.quantization.targets import find_packable_modules
from diffquant.recipe.numbers.formats import NumberFormat
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress


def round_to_nearest(_name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes int8 [rows, in] of some rows of a weight, and their scales from `weight_scale`.

    Rows that share a scale must be passed together, such as all rows for a scale per tensor.
    """
    scale = weight_scale(values, scheme, dtype)
    return weight_codes(values, scale, scheme), scale


class Nearest(Rounding):
    """Round-to-nearest with absmax scales."""

    name = "nearest"
    row_by_row = False

    def prepare(self, *_: Any, **__: Any) -> Rounder:
        return Rounder(round_to_nearest)


register(Nearest())


# Number of scales that are tried; the range of trials is wider for fewer bits, where clipping helps more.
_TRIALS = 20


def round_with_clipping(
    name: str,
    values: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    importance: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    """Return codes int8 [rows, in] of some rows, and the scales of least squared error.

    Scales are [rows, in/g] for groups of g values, or [rows, 1].

    Args:
        importance: factors [in] of the squared errors of each input channel, by name of the weight; 1 by default.
    """
    view, _ = scheme.sharing.view(values)
    weights = scheme.sharing.view(importance[name][None])[0] if name in importance else None
    scale = search_scales(view, scheme.format, dtype, weights)
    levels = nearest_levels(view, scale, scheme.format).reshape(values.shape)
    return level_codes(levels, scheme.format), scale.reshape(len(values), -1)


def search_scales(
    groups: Tensor, number_format: NumberFormat, dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """Return the scales [..., groups, 1] of least squared error of groups [..., groups, n]; see `search_scale`."""
    if (size := number_format.scales_per_step) == 1:
        return search_scale(groups, number_format, dtype, importance)
    parts = groups.unflatten(-2, (-1, size))
    importance = None if importance is None else importance.unflatten(-2, (-1, size))
    bound = number_format.with_fitted_step(search_scale(parts, number_format, dtype, importance), -2)
    found = search_scale(parts, bound, dtype, importance)
    plain = number_format.compute_scale(groups, -1, dtype).unflatten(-2, (-1, size))
    # Scales that are better without a common step may be worse once they are multiples of it.
    errors = [_squared_error(parts, each, number_format, importance).sum(-2, keepdim=True) for each in (plain, found)]
    return torch.where(errors[0] < errors[1], plain, found).flatten(-3, -2)


def search_scale(
    values: Tensor, number_format: NumberFormat, dtype: torch.dtype, importance: Tensor | None = None
) -> Tensor:
    """Return the scale of least squared error, using all levels, including the lowest, which absmax leaves unused.

    The scale may clip. For integers it is negative if the largest value is positive, so that the largest magnitude is
    on the negative side, which has one more code.

    Args:
        values: [..., n] float32; the n values of the last axis share a scale.
        number_format: format of the codes.
        dtype: dtype of the stored scale.
        importance: factor of each squared error, of a shape that broadcasts to that of `values`; 1 by default.

    Returns:
        [..., 1].
    """
    largest = number_format.compute_scale(values, -1)
    if number_format.has_integer_levels:
        largest = torch.where(values.amax(-1, keepdim=True) > -values.amin(-1, keepdim=True), -largest, largest)
    # If squares overflow, the absmax scale is kept.
    best, least = number_format.round_scale(largest, dtype), torch.full_like(largest, torch.inf)
    shares = number_format.trials or [1 - trial / (10 * number_format.code_width) for trial in range(_TRIALS)]

    def better(scale: Tensor) -> tuple[Tensor, Tensor]:
        error = _squared_error(values, scale, number_format, importance)
        return torch.where(error < least, scale, best), error.minimum(least)

    for share in shares:
        best, least = better(number_format.round_scale(largest * share, dtype))
    if number_format.refits_scale:
        levels = nearest_levels(values, best, number_format)
        pull = levels if importance is None else levels * importance
        tiny = torch.finfo(levels.dtype).tiny
        fitted = (pull * values).sum(-1, keepdim=True) / (pull * levels).sum(-1, keepdim=True).clamp(min=tiny)
        best, least = better(number_format.round_scale(fitted, dtype))
    return best


def _squared_error(values: Tensor, scale: Tensor, number_format: NumberFormat, weights: Tensor | None) -> Tensor:
    """Return the error [..., 1] of each group; see `search_scale`."""
    squares = nearest_levels(values, scale, number_format).mul_(scale.float()).sub_(values).square_()
    return (squares if weights is None else squares.mul_(weights)).sum(-1, keepdim=True)


def nearest_levels(values: Tensor, scale: Tensor, number_format: NumberFormat) -> Tensor:
    """Return the level nearest to each value / scale, out of all levels, including those that absmax leaves unused."""
    return number_format.round_to_all_levels_(values / scale.float())


def level_codes(levels: Tensor, number_format: NumberFormat) -> Tensor:
    """Return the int8 codes of levels; `levels` must contain only levels of the format."""
    if number_format.has_integer_levels:
        return levels.to(torch.int8, memory_format=torch.contiguous_format)
    return number_format.encode(levels, levels.new_ones(()))


class Mse(Rounding):
    """Round-to-nearest with scales of least squared error, weighted by an importance matrix if one is given."""

    name = "mse"
    options = frozenset({"imatrix"})

    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,  # noqa: ARG002
    ) -> Rounder:
        if settings.imatrix is None:
            return Rounder(round_with_clipping)
        # Imported here, since it imports gguf.
        from diffquant.checkpoints.imatrix import read_imatrix

        imatrix, tensors = read_imatrix(settings.imatrix), source.checkpoint.tensors
        weights = find_packable_modules(source).weights
        widths = {weights[module]: tensors[weights[module]].shape[-1] for module in schemes}
        weighted = partial(round_with_clipping, importance=imatrix.importance(widths, tensors))
        return Rounder(weighted, {"imatrix": imatrix.to_dict()})


register(Mse())
