"""Statistics of a stream of magnitudes in bounded memory: the exact largest, and quantiles from a histogram."""

import math

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError
from diffquant.model.walk import visible_entries
from diffquant.support.spelling import spelled

# The lower bits of a float32 that a bin ignores: 128 bins an octave.
_DROPPED_BITS = 16
# The bin that infinity would fall into, and so the number of those below.
_INFINITY = 0x7F800000 >> _DROPPED_BITS
# Half a bin at the bottom of an octave, where bins are widest against their values.
QUANTILE_ERROR = 2.0**-8


class Magnitudes:
    """A histogram of magnitudes whose bins are float32's exponent and the first seven bits of its fraction.

    Attributes:
        largest: the exact largest magnitudes so far, in descending order, float32.
    """

    def __init__(self, kept: int = 1) -> None:
        """Nothing is counted yet.

        Args:
            kept: how many of the largest are kept.
        """
        self._kept = kept
        self.counts = torch.zeros(_INFINITY, dtype=torch.int64)
        self.largest = torch.empty(0)

    @property
    def count(self) -> int:
        """Number of magnitudes counted."""
        return int(self.counts.sum())

    def add(self, magnitudes: Tensor, zeros_to_ignore: int = 0) -> None:
        """Count magnitudes.

        Args:
            magnitudes: any shape, float32, none negative.
            zeros_to_ignore: number of zeros among them that do not count.

        Raises:
            NonFiniteError: NaN or infinity is among them.
        """
        flat = magnitudes.reshape(-1)
        bins = (flat.view(torch.int32) >> _DROPPED_BITS).bincount(minlength=_INFINITY)
        if len(bins) > _INFINITY:
            raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}")
        bins[0] -= zeros_to_ignore
        self.counts += bins.cpu()
        self._keep(flat)

    def add_causal(self, logits: Tensor, first: int, window: int | None = None) -> None:
        """Count a block [..., R, S] of `causal_logits`, in place; hidden entries become zeros that do not count."""
        magnitudes = logits.abs_().tril_(first)
        if window is not None:
            magnitudes.triu_(first - window + 1)
        *outer, queries, keys = logits.shape
        self.add(magnitudes, magnitudes.numel() - visible_entries(math.prod(outer), queries, keys, window))

    def merge(self, other: "Magnitudes") -> None:
        """Add what another one has counted."""
        self.counts += other.counts
        self._keep(other.largest)

    def _keep(self, flat: Tensor) -> None:
        if len(self.largest) == self._kept:
            least = self.largest[-1].to(flat.device)
            if not flat.numel() or flat.amax() <= least:
                return
            flat = flat[flat > least]
        joined = torch.cat([self.largest, flat.topk(min(self._kept, flat.numel())).values.float().cpu()])
        self.largest = joined.topk(min(self._kept, joined.numel())).values

    @staticmethod
    def values() -> Tensor:
        """The middle of each bin, float32, ascending; the first holds 0 and what underflows."""
        edges = (torch.arange(_INFINITY + 1, dtype=torch.int32) << _DROPPED_BITS).view(torch.float32)
        return torch.cat([torch.zeros(1), (edges[1:-1] + edges[2:]) / 2])

    def quantile(self, share: float) -> float:
        """The smallest magnitude that `share` of all do not exceed, its relative error at most `QUANTILE_ERROR`."""
        rank = max(1, math.ceil(share * self.count))
        return float(self.values()[int((self.counts.cumsum(0) < rank).sum())])
