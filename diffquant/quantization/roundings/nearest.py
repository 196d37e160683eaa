"""Rounding by absmax scales, with every weight at its nearest code."""

from typing import Any

import torch
from torch import Tensor

from diffquant.formats.compressed_tensors import weight_codes, weight_scale
from diffquant.quantization.roundings.base import Rounder, Rounding, register
from diffquant.scheme import Scheme


def round_to_nearest(_name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, in] and absmax scales of some rows, or of a whole weight whose rows share one scale."""
    scale = weight_scale(values, scheme, dtype)
    return weight_codes(values, scale, scheme), scale


class Nearest(Rounding):
    """Rounding to the nearest code under absmax scales."""

    name = "nearest"
    row_by_row = False

    def prepare(self, *_: Any, **__: Any) -> Rounder:
        return Rounder(round_to_nearest)


register(Nearest())
