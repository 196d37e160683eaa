"""Sequences with padding, laid out for a recurrence that must not read it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The tokens of sequences with padding moved to the front, where the recurrence reads them without gaps.

    Attributes:
        order: position that each place is filled from, int64 [B, T].
        counts: number of each sequence's tokens, [B].
    """

    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, valid: Tensor | None) -> "Packing | None":
        """The packing of new tokens by their validity [B, T], or None if there is no padding."""
        if valid is None or valid.all():
            return None
        return cls((~valid).sort(dim=1, stable=True).indices, valid.sum(1))

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, E] with each sequence's tokens in front and padding behind them."""
        return x.take_along_dim(self.order[..., None], 1)

    def unpack(self, x: Tensor) -> Tensor:
        """Inverse of `pack`."""
        return x.take_along_dim(self.order.argsort(1)[..., None], 1)

    def silenced(self, step: Tensor) -> Tensor:
        """Step sizes [B, T, E] with 0 where a place holds padding."""
        places = torch.arange(step.shape[1], device=step.device)
        return step.masked_fill((places >= self.counts[:, None])[..., None], 0.0)
