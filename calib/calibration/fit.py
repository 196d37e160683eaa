"""How well static ranges fit activations they were not found on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.numerics import max_code
from diffquant.report.tables import aligned


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
    head = ["target", "clipped", "at most", "SQNR", "at least", "worst in"]
    lines = []
    for target in dict.fromkeys(fit.target for fit in fits):
        of = [fit for fit in fits if fit.target == target]
        worst, most = min(of, key=lambda fit: fit.sqnr), max(of, key=lambda fit: fit.clipped)
        clipped = [sum(f.clipped for f in of) / len(of), most.clipped]
        sqnr = [sum(f.sqnr for f in of) / len(of), worst.sqnr]
        lines.append([target, *(f"{c:.4%}" for c in clipped), *(f"{s:.1f} dB" for s in sqnr), f"layer {worst.layer}"])
    return "\n".join([*aligned(head, lines), "", f"at {bits} bits, on the text held out"])
