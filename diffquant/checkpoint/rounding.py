"""How a weight becomes codes and a stored scale; every way writes the same format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoint.codec import codes, decode_codes, weight_scale
from diffquant.errors import UsageError
from diffquant.numerics import sharing_view, storable_scale
from diffquant.scheme import Scheme

# (source name, values [rows, in], scheme, dtype of the stored scale) -> codes int8 [rows, in], scale as stored.
Round = Callable[[str, Tensor, Scheme, torch.dtype], tuple[Tensor, Tensor]]

# Shares of absmax that a clipped scale is looked for among. Below a half nothing was gained at 4 bits or more.
_SHARES = tuple(1 - step / 40 for step in range(21))


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
    """The scales with the least squared error, at most absmax; every weight goes to the nearest code."""
    scale = clipped_scale(values, scheme, dtype)
    return codes(values, scale, scheme), scale


def clipped_scale(values: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """As `weight_scale`, with the largest magnitudes clipped where that lowers the squared error."""
    whole = weight_scale(values, scheme, torch.float32)
    best, least = whole.to(dtype), torch.full_like(whole, torch.inf)
    for share in _SHARES:
        scale = storable_scale(whole * share, scheme.bits, dtype)
        lost = decode_codes(codes(values, scale, scheme), scale, scheme).float() - values
        view, dim = sharing_view(lost.square_(), scheme.granularity, scheme.size)
        error = view.sum(dim).view_as(whole)
        best, least = torch.where(error < least, scale, best), error.minimum(least)
    return best


def row_scheme(scheme: Scheme) -> Scheme:
    """The scheme of one group seen as a matrix of its own."""
    return replace(scheme, granularity="row", size=None)


NEAREST = Rounding("nearest", nearest)
CLIPPED = Rounding("mse", clipped)
