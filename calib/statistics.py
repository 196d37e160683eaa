"""Statistics of a stream in bounded memory: its exact largest values, and its quantiles from a histogram."""

import math

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError
from diffquant.support.spelling import spelled

# The lower bits of a float32 that a bin ignores: 128 bins an octave.
_DROPPED_BITS = 16
# The bin that infinity would fall into, and so the number of those below.
_INFINITY = 0x7F800000 >> _DROPPED_BITS
# Half a bin at the bottom of an octave, where bins are widest against their values.
QUANTILE_ERROR = 2.0**-8


class Largest:
    """The exact k largest values of a stream.

    Attributes:
        values: largest values so far, in descending order, float32.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.values = torch.empty(0)

    def add(self, values: Tensor) -> None:
        """Take in values: floats of any shape."""
        flat = values.reshape(-1)
        if len(self.values) == self._count:
            least = self.values[-1].to(flat.device)
            if not flat.numel() or flat.amax() <= least:
                return
            flat = flat[flat > least]
        joined = torch.cat([self.values, flat.topk(min(self._count, flat.numel())).values.float().cpu()])
        self.values = joined.topk(min(self._count, joined.numel())).values


class Magnitudes:
    """A histogram of magnitudes whose bins are float32's exponent and the first seven bits of its fraction."""

    def __init__(self) -> None:
        self.counts = torch.zeros(_INFINITY, dtype=torch.int64)

    @property
    def count(self) -> int:
        """Number of magnitudes counted."""
        return int(self.counts.sum())

    def add(self, magnitudes: Tensor, zeros_to_ignore: int = 0) -> None:
        """Count magnitudes.

        Args:
            magnitudes: any shape, contiguous float32, none negative.
            zeros_to_ignore: number of zeros among them that do not count.

        Raises:
            NonFiniteError: NaN or infinity is among them.
        """
        bins = (magnitudes.reshape(-1).view(torch.int32) >> _DROPPED_BITS).bincount(minlength=_INFINITY)
        if len(bins) > _INFINITY:
            raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}")
        bins[0] -= zeros_to_ignore
        self.counts += bins.cpu()

    def merge(self, other: "Magnitudes") -> None:
        """Add another histogram's counts."""
        self.counts += other.counts

    @staticmethod
    def values() -> Tensor:
        """The middle of each bin, float32, ascending; the first holds 0 and what underflows."""
        edges = (torch.arange(_INFINITY + 1, dtype=torch.int32) << _DROPPED_BITS).view(torch.float32)
        return torch.cat([torch.zeros(1), (edges[1:-1] + edges[2:]) / 2])

    def quantile(self, share: float) -> float:
        """The smallest magnitude that `share` of all do not exceed, its relative error at most `QUANTILE_ERROR`."""
        rank = max(1, math.ceil(share * self.count))
        return float(self.values()[int((self.counts.cumsum(0) < rank).sum())])
