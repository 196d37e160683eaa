"""The fit of static ranges to activations that they were not calibrated on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.calib.calibration.layers import Projections, by_token, projected_layers
from diffquant.family.spec import DiffSpec
from diffquant.model.modeling import DiffTransformer
from diffquant.model.walk import causal_logits, visible_entries
from diffquant.numbers.absmax import max_code
from diffquant.recipe.targets import CALIBRATED_TARGETS
from diffquant.report.tables import aligned
from diffquant.support.progress import Progress, silent


@dataclass(frozen=True)
class Fit:
    """How well the ranges of one layer's target fit text that they were not calibrated on.

    Attributes:
        layer: number of the layer.
        target: "k", "v" or "logits".
        clipped: share of entries beyond their range.
        sqnr: signal-to-noise ratio of the entries as their codes read back, in dB.
    """

    layer: int
    target: str
    clipped: float
    sqnr: float


@torch.inference_mode()
def measure_fit(
    model: DiffTransformer,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    bits: int,
    batch_tokens: int,
    progress: Progress = silent,
) -> list[Fit]:
    """Fits of ranges to windows that they were not calibrated on, layer by layer.

    Args:
        model: model that the ranges belong to.
        ids: [N, T] windows.
        tensors: ranges by name, as `observe_ranges` gives them.
        bits: width of the codes.
        batch_tokens: most tokens of one pass.
    """
    spec, layers = model.config.diff_spec, model.config.num_hidden_layers
    fits: list[Fit] = []
    for number, projections in enumerate(projected_layers(model, ids, batch_tokens)):
        names = {target: f"layers.{number}.{target}" for target in CALIBRATED_TARGETS}
        ranges = {target: tensors[name] for target, name in names.items() if name in tensors}
        losses = _layer_losses(projections, ranges, bits, spec)
        fits += [loss.to_fit(number, target) for target, loss in losses.items()]
        progress(number + 1, layers, "checking on the text held out")
    return fits


class RoundingLoss:
    """The loss of rounding a stream of values to static codes."""

    def __init__(self) -> None:
        self.count = self.clipped = 0
        self._signal = self._noise = 0.0

    def add(self, values: Tensor, ranges: Tensor, bits: int) -> None:
        """Count values against their ranges, broadcastable; an entry of 0 adds to the count alone."""
        largest = max_code(bits)
        ranges = ranges.to(values.device)
        scale = ranges / largest
        read_back = (values / scale).round_().clamp_(-largest, largest).mul_(scale)
        self.count += values.numel()
        self.clipped += int((values.abs() > ranges).sum())
        self._signal += float(values.square().sum(dtype=torch.float64))
        self._noise += float((values - read_back).square_().sum(dtype=torch.float64))

    def to_fit(self, layer: int, target: str) -> Fit:
        sqnr = 10 * math.log10(self._signal / self._noise) if self._signal and self._noise else math.inf
        return Fit(layer, target, self.clipped / max(1, self.count), sqnr)


def _layer_losses(
    projections: list[Projections], ranges: Mapping[str, Tensor], bits: int, spec: DiffSpec
) -> dict[str, RoundingLoss]:
    losses = {target: RoundingLoss() for target in ranges}
    for q, k, v, _ in projections:
        if "k" in ranges:
            losses["k"].add(by_token(k), ranges["k"], bits)
        if "v" in ranges:
            losses["v"].add(by_token(v), ranges["v"], bits)
        if "logits" in ranges:
            for first, block in causal_logits(q, k, spec):
                losses["logits"].add(block.tril_(first), ranges["logits"][:, None, None], bits)
                batch, heads, queries, keys = block.shape
                losses["logits"].count -= block.numel() - visible_entries(batch * heads, queries, keys)
    return losses


def fit_table(fits: Sequence[Fit], bits: int) -> str:
    """A table with a line for each target: mean and worst over its layers."""
    head = ["target", "clipped", "at most", "SQNR", "at least", "worst in"]
    lines = []
    for target in dict.fromkeys(fit.target for fit in fits):
        layers = [fit for fit in fits if fit.target == target]
        worst, most = min(layers, key=lambda fit: fit.sqnr), max(layers, key=lambda fit: fit.clipped)
        clipped = [sum(fit.clipped for fit in layers) / len(layers), most.clipped]
        sqnr = [sum(fit.sqnr for fit in layers) / len(layers), worst.sqnr]
        lines.append([target, *(f"{c:.4%}" for c in clipped), *(f"{s:.1f} dB" for s in sqnr), f"layer {worst.layer}"])
    return "\n".join([*aligned(head, lines), "", f"at {bits} bits, on the text held out"])
