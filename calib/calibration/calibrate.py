"""Implementation of `diffquant calibrate`: ranges of K, V and logits from half of a text, tested on the other half."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.observe import (
    Projections,
    flatten_tokens,
    iterate_projections,
    make_ranges,
    observe_ranges,
)
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.calibration import read_calibration
from diffquant.checkpoints.corpora import Sources, open_corpora
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.modeling import DiffTransformer
from diffquant.model.walk import BATCH_TOKENS, count_visible_logits, iterate_unmasked_logits
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.absmax import max_code
from diffquant.recipe.targets import CALIBRATED_TARGETS
from diffquant.reports.tables import align_columns
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.progress import Progress, report_nothing


@dataclass(frozen=True)
class RangeQuality:
    """Quantization error of one layer's K, V or logits under calibrated ranges, measured on held-out text.

    Attributes:
        layer: index of the layer.
        target: "k", "v" or "logits".
        clipped: fraction of values whose magnitude exceeds the range.
        sqnr: signal-to-quantization-noise ratio in dB; infinite without an error.
    """

    layer: int
    target: str
    clipped: float
    sqnr: float


@torch.inference_mode()
def measure_range_quality(
    model: DiffTransformer,
    ids: Tensor,
    tensors: Mapping[str, Tensor],
    bits: int,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> list[RangeQuality]:
    """Measure the quantization error of each layer's K, V and logits under calibrated ranges, on held-out windows.

    Args:
        model: model that was calibrated.
        ids: token ids [N, T] of N held-out windows.
        tensors: ranges by name, as `observe_ranges` returns them.
        bits: width of the codes.
        batch_tokens: largest number of tokens per forward pass.
    """
    spec, layers = model.config.diff_spec, model.config.num_hidden_layers
    fits: list[RangeQuality] = []
    for number, projections in enumerate(iterate_projections(model, ids, batch_tokens)):
        names = {target: f"layers.{number}.{target}" for target in CALIBRATED_TARGETS}
        ranges = {target: tensors[name] for target, name in names.items() if name in tensors}
        for target, sums in _layer_sums(projections, ranges, bits, spec).items():
            count, clipped, signal, noise = sums.tolist()
            sqnr = 10 * math.log10(signal / noise) if signal and noise else math.inf
            fits.append(RangeQuality(number, target, clipped / max(1, count), sqnr))
        progress(number + 1, layers, "checking on held-out text")
    return fits


def _layer_sums(
    projections: list[Projections], ranges: Mapping[str, Tensor], bits: int, spec: DiffSpec
) -> dict[str, Tensor]:
    """Return the sums of `rounding_sums` over one layer's batches, by target."""
    sums = {target: torch.zeros(4, dtype=torch.float64) for target in ranges}
    for q, k, v, _ in projections:
        if "k" in ranges:
            sums["k"] += rounding_sums(flatten_tokens(k), ranges["k"], bits)
        if "v" in ranges:
            sums["v"] += rounding_sums(flatten_tokens(v), ranges["v"], bits)
        if "logits" in ranges:
            for first, block in iterate_unmasked_logits(q, k, spec):
                sums["logits"] += rounding_sums(block.tril_(first), ranges["logits"][:, None, None], bits)
                batch, heads, queries, keys = block.shape
                sums["logits"][0] -= block.numel() - count_visible_logits(batch * heads, queries, keys)
    return sums


def rounding_sums(values: Tensor, ranges: Tensor, bits: int) -> Tensor:
    """Quantize values with static ranges, and return four sums in float64 [4].

    They are the number of values, the number beyond their range, and the sums of squares of values and of errors.

    Args:
        values: values of any shape.
        ranges: largest magnitudes that codes can represent, above 0, broadcastable to `values`.
        bits: width of the codes.
    """
    largest = max_code(bits)
    ranges = ranges.to(values.device)
    scale = ranges / largest
    read_back = (values / scale).round_().clamp_(-largest, largest).mul_(scale)
    signal, noise = (x.square().sum(dtype=torch.float64) for x in (values, values - read_back))
    return torch.tensor([values.numel(), (values.abs() > ranges).sum(), signal, noise], dtype=torch.float64)


def range_quality_table(fits: Sequence[RangeQuality], bits: int) -> str:
    """Return a text table of ranges' errors, with a line for each target: the mean over the layers, and the worst."""
    head = ["target", "clipped", "at most", "SQNR", "at least", "worst in"]
    lines = []
    for target in dict.fromkeys(fit.target for fit in fits):
        layers = [fit for fit in fits if fit.target == target]
        worst, most = min(layers, key=lambda fit: fit.sqnr), max(layers, key=lambda fit: fit.clipped)
        clipped = [sum(fit.clipped for fit in layers) / len(layers), most.clipped]
        sqnr = [sum(fit.sqnr for fit in layers) / len(layers), worst.sqnr]
        lines.append([target, *(f"{c:.4%}" for c in clipped), *(f"{s:.1f} dB" for s in sqnr), f"layer {worst.layer}"])
    return "\n".join([*align_columns(head, lines), "", f"at {bits} bits, on held-out text"])


def calibrate(
    path: Path | str | Source,
    targets: Sequence[str] = CALIBRATED_TARGETS,
    observer: Observer | None = None,
    *,
    text: Sources = None,
    tokens: int = 16384,
    window: int = 512,
    dtype: str = "float32",
    device: str = "auto",
    places: OffloadPlan | None = None,
    progress: Progress = report_nothing,
) -> tuple[Ranges, list[RangeQuality]]:
    """Calibrate ranges on the first half of a text's windows, and measure their error on the second half.

    Args:
        path: checkpoint, quantized or not.
        targets: activations to calibrate, among `CALIBRATED_TARGETS`.
        observer: rule that turns magnitudes into ranges; absmax by default.
        text: files or datasets to read, as `read_calibration` accepts them; the bundled text by default.
        tokens: largest number of tokens to read, over both halves.
        window: context length in tokens.
        dtype: dtype of the model.
        device: device to run on, unless `places` is given.
        places: devices, main memory and disk to spread the model over, or None to use one device.

    Returns:
        The ranges, and their error on the second half by layer and target.

    Raises:
        UsageError: a target is unknown or none is given, the text has fewer than two windows, or there is no such
            device.
        NonFiniteError: the model computes NaN or infinity.
    """
    _check_targets(targets)
    observer = observer or Observer()
    device = resolve_device(places.device if places else device)
    open_corpora(text)  # before the model is loaded
    source = open_source(path)
    source.require_transformer("calibrate")
    tokenizer = source.tokenizer
    model = load(source, Recipe(), resolve_dtype(dtype, device), device, device_map=places)
    calibration = read_calibration(text, tokenizer, model.config, window, tokens)
    ids = calibration.ids.to(model.device)
    if len(ids) < 2:
        read = f"{tokens} tokens are" if tokens < 2 * window else "the text has"
        raise UsageError(f"{read} only one window of {window} tokens; two are needed: give more or a shorter window")
    observed, held_out = ids.tensor_split([(len(ids) + 1) // 2])
    tensors = observe_ranges(model, observed, targets, observer, progress)
    fits = measure_range_quality(model, held_out, tensors, observer.bits, progress=progress)
    return make_ranges(source, model, observed, calibration.digest, observer, tensors), fits


def _check_targets(targets: Sequence[str]) -> None:
    known = ", ".join(CALIBRATED_TARGETS)
    if "hidden" in targets:
        raise UsageError(f"no scheme quantizes hidden states, so they have no ranges; calibrate {known}")
    unknown = [target for target in targets if target not in CALIBRATED_TARGETS]
    if not targets:
        raise UsageError(f"no target is given; choose from {known}")
    if unknown:
        raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; choose from {known}")
