"""How well static ranges fit activations they were not found on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.numerics import max_code


@dataclass(frozen=True)
class Fit:
    """How well one tensor's range fits text it was not found on.

    Attributes:
        clipped: share of entries beyond the range.
        sqnr: of the entries as their codes read back, in dB.
    """

    layer: int
    target: str
    clipped: float
    sqnr: float


class Loss:
    """What rounding to static codes does to a stream."""

    def __init__(self) -> None:
        self.count = self.clipped = 0
        self._signal = self._noise = 0.0

    def add(self, values: Tensor, ranges: Tensor, bits: int) -> "Loss":
        """values and their ranges, broadcastable; an entry of 0 adds to the count alone."""
        largest = max_code(bits)
        step = ranges.to(values.device) / largest
        read_back = (values / step).round_().clamp_(-largest, largest).mul_(step)
        self.count += values.numel()
        self.clipped += int((values.abs() > ranges.to(values.device)).sum())
        self._signal += float(values.square().sum(dtype=torch.float64))
        self._noise += float((values - read_back).square_().sum(dtype=torch.float64))
        return self

    def fit(self, layer: int, target: str) -> Fit:
        sqnr = 10 * math.log10(self._signal / self._noise) if self._signal and self._noise else math.inf
        return Fit(layer, target, self.clipped / max(1, self.count), sqnr)


def fit_table(fits: Sequence[Fit], bits: int) -> str:
    """One line a target: mean and worst over its layers."""
    lines = [
        f"{'target':8}  {'clipped':>8}  {'at most':>8}  {'SQNR':>8}  {'at least':>8}  at {bits} bits, text held out"
    ]
    for target in dict.fromkeys(fit.target for fit in fits):
        of = [fit for fit in fits if fit.target == target]
        worst, most = min(of, key=lambda fit: fit.sqnr), max(of, key=lambda fit: fit.clipped)
        lines.append(
            f"{target:8}  {sum(f.clipped for f in of) / len(of):8.4%}  {most.clipped:8.4%}  "
            f"{sum(f.sqnr for f in of) / len(of):5.1f} dB  {worst.sqnr:5.1f} dB  worst in layer {worst.layer}"
        )
    return "\n".join(lines)
