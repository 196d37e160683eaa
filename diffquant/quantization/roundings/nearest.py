"""Rounding by absmax scales, with every weight at its nearest code."""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.formats.compressed_tensors import weight_codes, weight_scale
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.recipe.rounding import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress


def round_to_nearest(_name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, in] and absmax scales of some rows, or of a whole weight whose rows share one scale."""
    scale = weight_scale(values, scheme, dtype)
    return weight_codes(values, scale, scheme), scale


class Nearest(Rounding):
    """Rounding to the nearest code under absmax scales."""

    name = "nearest"
    row_by_row = False

    def prepare(
        self,
        source: Source | WeightSource,  # noqa: ARG002
        schemes: Mapping[str, Scheme],  # noqa: ARG002
        settings: RoundingSettings,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> Rounder:
        return Rounder(round_to_nearest)


register(Nearest())
