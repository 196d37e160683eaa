"""How a weight becomes codes and a stored scale; every way writes the same format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.formats.compressed_tensors import codes, weight_scale
from diffquant.numerics import absmax_scale, max_code, sharing_view, storable_scale
from diffquant.scheme import Scheme

# (source name, values [rows, in], scheme, dtype of the stored scale) -> codes int8 [rows, in], scale as stored.
Round = Callable[[str, Tensor, Scheme, torch.dtype], tuple[Tensor, Tensor]]

# Scales that are tried; the fewer the bits, the more clipping gains.
_STEPS = 20


@dataclass(frozen=True)
class Rounding:
    """A way to round.

    Attributes:
        name: as `--rounding` has it.
        round: works on any rows of a weight whose scales do not span rows.
        identity: what else its result depends on.
    """

    name: str
    round: Round
    identity: Mapping[str, Any] = field(default_factory=dict)

    def check(self, schemes: Mapping[str, Scheme]) -> None:
        """Check that no scale spans rows, where that matters.

        Raises:
            UsageError: with the modules whose scale does.
        """
        whole = [name for name, scheme in schemes.items() if scheme.granularity == "tensor"]
        if whole and self != NEAREST:
            raise UsageError(
                f"--rounding {self.name} works row by row and {', '.join(whole)} have one scale a tensor; use a group "
                "or row granularity, or --rounding nearest"
            )


def nearest(name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Absmax scales; every weight goes to the nearest code."""
    scale = weight_scale(values, scheme, dtype)
    return codes(values, scale, scheme), scale


def clipped(name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales with the least squared error; every weight goes to the nearest code."""
    view, _ = sharing_view(values, scheme.granularity, scheme.size)
    scale = fitted_scale(view, scheme.bits, dtype)
    return all_codes(view, scale, scheme.bits).reshape(values.shape), scale.reshape(len(values), -1)


def fitted_scale(values: Tensor, bits: int, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """The scale with the least squared error over all 2^b codes.

    It may clip, and its sign is such that the largest magnitude has the side with one code more.

    Args:
        values: [..., n] float32; the n share a scale.
        bits: 2 to 8.
        dtype: of the stored scale.
        weights: of each square, [n]; alike by default.

    Returns:
        [..., 1].
    """
    whole = absmax_scale(values, bits, -1)
    whole = torch.where(values.amax(-1, keepdim=True) > -values.amin(-1, keepdim=True), -whole, whole)
    best, least = whole.to(dtype), torch.full_like(whole, torch.inf)
    for share in (1 - step / (10 * bits) for step in range(_STEPS)):
        scale = storable(whole * share, bits, dtype)
        kept = _nearest(values, scale.float(), bits).mul_(scale.float())
        lost = kept.sub_(values).square_()
        error = (lost if weights is None else lost.mul_(weights)).sum(-1, keepdim=True)
        # A half type may hold the scale and not its product with the lowest code.
        error = error.where((scale * lowest_code(bits)).isfinite() | (share == 1), torch.inf)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def storable(scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """As `storable_scale`, for scales of either sign."""
    return storable_scale(scale.abs(), bits, dtype).copysign(scale.to(dtype))


def all_codes(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Nearest codes int8 of values, the lowest one, which absmax leaves unused, included."""
    return _nearest(values, scale.float(), bits).to(torch.int8)


def lowest_code(bits: int) -> int:
    return -(2 ** (bits - 1))


def _nearest(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (values / scale).round_().clamp_(lowest_code(bits), max_code(bits))


NEAREST = Rounding("nearest", nearest)
CLIPPED = Rounding("mse", clipped)
