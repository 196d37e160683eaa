"""Observers, rules that turn magnitudes into ranges: absmax, a percentile, or the least mean squared error."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError, UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.walk import count_visible_logits
from diffquant.recipe.numbers.absmax import max_code
from diffquant.support.names import option_name

# Number of low bits of a float32 that bins ignore: there are 128 bins per octave.
_DROPPED_BITS = 16
# Bin of infinity, and so the number of bins for finite values.
_INFINITY = 0x7F800000 >> _DROPPED_BITS
# Largest relative error of a quantile: half a bin at the bottom of an octave, where bins are widest relative to values.
QUANTILE_ERROR = 2.0**-8


class MagnitudeHistogram:
    """A histogram of magnitudes with 128 bins per octave: a bin is a float32's exponent and its first 7 fraction bits.

    Attributes:
        counts: number of magnitudes in each bin, int64 [bins].
        largest: exact largest magnitudes so far, in descending order, float32; as many as the constructor's `kept`, or
            fewer if fewer were counted.
    """

    def __init__(self, kept: int = 1) -> None:
        """Create an empty histogram.

        Args:
            kept: how many of the largest magnitudes to keep exactly.
        """
        self._kept = kept
        self.counts = torch.zeros(_INFINITY, dtype=torch.int64)
        self.largest = torch.empty(0)

    @property
    def count(self) -> int:
        """Number of magnitudes counted."""
        return int(self.counts.sum())

    def add(self, magnitudes: Tensor, zeros_to_ignore: int = 0) -> None:
        """Add magnitudes to the histogram.

        Args:
            magnitudes: float32 of any shape, 0 or more.
            zeros_to_ignore: number of zeros in `magnitudes` that are left out of the histogram.

        Raises:
            NonFiniteError: a magnitude is NaN or infinite.
        """
        flat = magnitudes.reshape(-1)
        bins = (flat.view(torch.int32) >> _DROPPED_BITS).bincount(minlength=_INFINITY)
        if len(bins) > _INFINITY:
            raise NonFiniteError(f"the model computes NaN or infinity; use {option_name('dtype', 'float32')}")
        bins[0] -= zeros_to_ignore
        self.counts += bins.cpu()
        self._keep(flat)

    def add_causal(self, logits: Tensor, first: int, window: int | None = None) -> None:
        """Count the magnitudes of attention logits, except those that a causal mask hides.

        Args:
            logits: [..., R, S] of R queries and S keys, from `iterate_unmasked_logits`; overwritten.
            first: position of the first query among the keys.
            window: number of newest keys that a query can attend to, its own included; all by default.
        """
        magnitudes = logits.abs_().tril_(first)
        if window is not None:
            magnitudes.triu_(first - window + 1)
        *outer, queries, keys = logits.shape
        self.add(magnitudes, magnitudes.numel() - count_visible_logits(math.prod(outer), queries, keys, window))

    def merge(self, other: "MagnitudeHistogram") -> None:
        """Add another histogram's counts."""
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
    def bin_centers() -> Tensor:
        """Return the center of each bin, float32 [bins], ascending; 0 for the first, which also counts tiny values."""
        edges = (torch.arange(_INFINITY + 1, dtype=torch.int32) << _DROPPED_BITS).view(torch.float32)
        return torch.cat([torch.zeros(1), (edges[1:-1] + edges[2:]) / 2])

    def quantile(self, share: float) -> float:
        """Return the quantile of all magnitudes at `share` (0 to 1), with a relative error of at most `QUANTILE_ERROR`.

        At least one magnitude must have been counted.
        """
        rank = max(1, math.ceil(share * self.count))
        return float(self.bin_centers()[int((self.counts.cumsum(0) < rank).sum())])


KINDS = ("absmax", "percentile", "mse")
# The search for the least squared error divides the largest magnitude by this factor per step, down to a thousandth,
# and then tries sixths of a step around the best.
_FACTOR, _STEPS, _PARTS = 1.2, 38, 6


@dataclass(frozen=True)
class Observer:
    """A rule that turns magnitudes into ranges.

    Attributes:
        kind: "absmax", "percentile" or "mse".
        percentile: percentage of magnitudes that are not clipped, for "percentile".
        bits: width of the codes for which "mse" minimizes the error of rounding and clipping.
    """

    kind: str = "absmax"
    percentile: float = 99.99
    bits: int = 8

    @classmethod
    def parse(cls, text: str, bits: int = 8) -> "Observer":
        """Parse an observer's name: "absmax", "mse", "percentile", or "percentile:99.9".

        Args:
            bits: width of the codes; only "mse" depends on it.

        Raises:
            UsageError: the text is none of these.
        """
        kind, _, percentage = text.partition(":")
        if percentage and kind in KINDS and kind != "percentile":
            raise UsageError(f"observer {kind} takes no percentage: give {kind}, or percentile:{percentage}")
        try:
            return cls(kind, float(percentage) if percentage else cls.percentile, bits)
        except ValueError as error:
            raise UsageError(f"cannot read observer {text!r}: give a percentage, such as percentile:99.9") from error

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown observer {self.kind!r}; choose from {', '.join(KINDS)}")
        if not 50 <= self.percentile <= 100:
            raise UsageError(f"a percentile must be between 50 and 100, got {self.percentile:g}")
        max_code(self.bits)

    def ranges(self, magnitudes: Tensor, bounds: Tensor | None = None) -> Tensor:
        """Return the range of each channel.

        Args:
            magnitudes: [N, C], N magnitudes of each of C channels.
            bounds: [N, C] upper bounds to choose the ranges from; by default the magnitudes. For keys, these are the
                L2 norms of two channels that RoPE rotates into each other, which no position exceeds.

        Returns:
            float32 [C]; 1 for channels that are all zero.
        """
        bounds = magnitudes if bounds is None else bounds
        if self.kind == "percentile":
            rank = max(1, math.ceil(self.percentile / 100 * len(bounds)))
            tops = bounds.kthvalue(rank, 0).values
        else:
            tops = bounds.amax(0)
        if self.kind == "mse":
            tops = self._least_error(tops, lambda tops: _squared_error(magnitudes, tops, self.bits).sum(0))
        return torch.where(tops == 0, 1.0, tops).float()

    def ranges_from_histograms(self, counts: Tensor, values: Tensor, largest: Tensor) -> Tensor:
        """Return the range of each head, float32 [heads], from histograms of magnitudes.

        Args:
            counts: [heads, bins] number of magnitudes in each bin.
            values: [bins] magnitude of each bin, ascending.
            largest: [heads] exact largest magnitudes.
        """
        tops = largest
        if self.kind == "percentile":
            ranks = (self.percentile / 100 * counts.sum(1, keepdim=True).double()).ceil()
            tops = values[(counts.cumsum(1) < ranks).sum(1)].minimum(largest)
        if self.kind == "mse":
            # Empty bins are skipped: the highest ones have magnitudes whose squares overflow.
            used = counts.any(0)
            weights, used_values = counts[:, used].double(), values[used]
            tops = self._least_error(
                largest, lambda tops: (weights * _squared_error(used_values, tops[:, None], self.bits)).sum(1)
            )
        return torch.where(tops == 0, 1.0, tops).float()

    def _least_error(self, largest: Tensor, error_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the ranges [C], at most `largest`, with the least error."""
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


def swap_rotation_partners(keys: Tensor, spec: DiffSpec) -> Tensor:
    """Swap the two channels of each pair that RoPE rotates into each other, in keys [..., channels]."""
    if spec.rope == "half":
        return keys.roll(keys.shape[-1] // 2, -1)
    partners: Tensor = keys.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return partners


def key_ranges(observer: Observer, keys: Tensor, spec: DiffSpec) -> Tensor:
    """Return the range of each channel of rotated keys, float32 [heads·width].

    RoPE rotates two channels into each other, by an angle that grows with the position. So both share a range, which is
    chosen from their L2 norm. No position exceeds that norm, but longer texts exceed the values seen on a short one.

    Args:
        observer: rule that turns magnitudes into ranges.
        keys: rotated keys [tokens, heads, width].
        spec: specification of the attention.
    """
    if spec.rope == "none":
        return observer.ranges(keys.abs().flatten(1))
    partners = swap_rotation_partners(keys, spec)
    magnitudes = torch.cat([keys, partners]).abs().flatten(1)
    lengths = keys.hypot(partners).flatten(1)
    return observer.ranges(magnitudes, lengths)


def _squared_error(magnitudes: Tensor, tops: Tensor, bits: int) -> Tensor:
    """Return the squared error of quantizing magnitudes with ranges `tops`, broadcastable to them."""
    scale = torch.where(tops == 0, 1.0, tops / max_code(bits))
    codes = (magnitudes / scale).round_().clamp_(max=max_code(bits))
    return (codes * scale - magnitudes).square_()
