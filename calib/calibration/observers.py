"""Observers, the rules from magnitudes to ranges: all, all but a share, or where the squared error is least."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.numbers.absmax import max_code
from diffquant.support.spelling import spelled

KINDS = ("absmax", "percentile", "mse")
# The search for the least squared error goes down from the largest magnitude by this factor a step, to a
# thousandth of it, and then looks around the best by a sixth of a step.
_FACTOR, _STEPS, _PARTS = 1.2, 38, 6


@dataclass(frozen=True)
class Observer:
    """A rule from magnitudes to ranges.

    Attributes:
        kind: name of the rule, "absmax", "percentile" or "mse".
        percentile: percentage of magnitudes that are not clipped, for "percentile".
        bits: width of the codes whose rounding "mse" weighs against clipping.
    """

    kind: str = "absmax"
    percentile: float = 99.99
    bits: int = 8

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown observer {self.kind!r}; known are {', '.join(KINDS)}")
        if not 50 <= self.percentile <= 100:
            raise UsageError(f"{spelled('percentile')} must be between 50 and 100, got {self.percentile:g}")
        max_code(self.bits)

    def ranges(self, magnitudes: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Ranges of channels.

        Args:
            magnitudes: [N, C], none negative.
            lengths: [N, C] bounds of each magnitude at any position, such as the length of two channels that
                rotate into each other; the magnitudes themselves by default.

        Returns:
            float32 [C]; 1 where all are zero.
        """
        bounds = magnitudes if lengths is None else lengths
        if self.kind == "percentile":
            rank = max(1, math.ceil(self.percentile / 100 * len(bounds)))
            tops = bounds.kthvalue(rank, 0).values
        else:
            tops = bounds.amax(0)
        if self.kind == "mse":
            tops = self._least_error(tops, lambda tops: _squared_error(magnitudes, tops, self.bits).sum(0))
        return torch.where(tops == 0, 1.0, tops).float()

    def ranges_of_counts(self, counts: Tensor, values: Tensor, largest: Tensor) -> Tensor:
        """Ranges of heads, from histograms of their magnitudes.

        Args:
            counts: [H, bins] magnitudes in each bin.
            values: [bins] ascending, the magnitude of each bin.
            largest: [H] exact largest magnitudes.
        """
        tops = largest
        if self.kind == "percentile":
            ranks = (self.percentile / 100 * counts.sum(1, keepdim=True).double()).ceil()
            tops = values[(counts.cumsum(1) < ranks).sum(1)].minimum(largest)
        if self.kind == "mse":
            # The bins that nobody fills reach to float32's end, where squares overflow.
            used = counts.any(0)
            weights, used_values = counts[:, used].double(), values[used]
            tops = self._least_error(
                largest, lambda tops: (weights * _squared_error(used_values, tops[:, None], self.bits)).sum(1)
            )
        return torch.where(tops == 0, 1.0, tops).float()

    def _least_error(self, largest: Tensor, error_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The ranges up to `largest` [C] with the least error."""
        best, least = largest, error_of(largest)
        coarse = [largest * _FACTOR**-step for step in range(1, _STEPS + 1)]
        for tops in coarse:
            error = error_of(tops)
            best, least = torch.where(error < least, tops, best), error.minimum(least)
        around = [best * _FACTOR ** (part / _PARTS) for part in range(1 - _PARTS, _PARTS) if part]
        for tops in around:
            error = error_of(tops.minimum(largest))
            best, least = torch.where(error < least, tops.minimum(largest), best), error.minimum(least)
        return best


def rotation_partners(keys: Tensor, spec: DiffSpec) -> Tensor:
    """Keys [..., d] with every two channels that rotate into each other exchanged."""
    if spec.rope == "half":
        return keys.roll(keys.shape[-1] // 2, -1)
    partners: Tensor = keys.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return partners


def key_ranges(observer: Observer, keys: Tensor, spec: DiffSpec) -> Tensor:
    """Ranges [C] of rotated keys [N, H, d], C = H·d.

    Rotation turns two channels into each other, by more the later the token: both share a range, and what no
    position exceeds is their length as a vector, while their own largest values on short text underestimate.
    """
    if spec.rope == "none":
        return observer.ranges(keys.abs().flatten(1))
    partners = rotation_partners(keys, spec)
    magnitudes = torch.cat([keys, partners]).abs().flatten(1)
    lengths = keys.hypot(partners).flatten(1)
    return observer.ranges(magnitudes, lengths)


def _squared_error(magnitudes: Tensor, tops: Tensor, bits: int) -> Tensor:
    """Squared error of rounding to codes that end at `tops`, broadcastable to the magnitudes."""
    scale = torch.where(tops == 0, 1.0, tops / max_code(bits))
    codes = (magnitudes / scale).round_().clamp_(max=max_code(bits))
    return (codes * scale - magnitudes).square_()
