"""Calibration of keys and values on a little bundled text, for exports with a quantized cache."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.calibrate import rounding_sums
from diffquant.calib.calibration.observe import (
    Projections,
    compute_layer_ranges,
    flatten_tokens,
    iterate_projections,
    make_ranges,
)
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import check_tokens, text_digest
from diffquant.data import books_text
from diffquant.errors import CheckpointError, UsageError
from diffquant.model.causal import CausalModel
from diffquant.quantization.loading import load_by_layer
from diffquant.recipe import Recipe
from diffquant.support.progress import Progress, report_nothing

# Keys and values within a window are similar, above all if attention is flat: many short windows are more varied than a
# few long ones with as many tokens.
_WINDOWS, _WINDOW = 128, 16
# Factor of calibrated ranges: a clipped key or value costs far more than a range that is a tenth too wide.
_MARGIN = 1.1
# Tokens per forward pass of a layer. The tokens of the last pass also serve as held-out text for `_held_out_loss`.
_BATCH_TOKENS = 512
_BITS = 8


def calibrate_cache(
    path: Path | str | Source,
    recipe: Recipe | None = None,
    ids: Tensor | None = None,
    progress: Progress = report_nothing,
) -> Ranges:
    """Calibrate ranges of K and V for caches of any bit width: 1.1 times the largest magnitudes on a text.

    Args:
        path: checkpoint, quantized or not.
        recipe: schemes of the weights and logits while the model is calibrated, those that it will run with. By
            default weights stay as stored, and logits at 16 bits.
        ids: token ids [N, T] of N windows of text to calibrate on; windows of the bundled text by default.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one that does not match its vocabulary.
        NonFiniteError: the model computes NaN or infinity.
    """
    source, text = open_source(path), ""
    if ids is None:
        text = books_text()
        ids = _prose_windows(source, text)
    model, observer = load_by_layer(source, recipe or Recipe()), Observer("absmax")
    layers, losses = source.architecture.num_hidden_layers, {0: 1.0}
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode():
        for number, projections in enumerate(iterate_projections(model, ids, _BATCH_TOKENS)):
            found = compute_layer_ranges(model, number, projections, ("k", "v"), observer)
            if found and len(projections) > 1:
                losses[number] = _held_out_loss(model, number, projections, observer)
            tensors |= {name: _MARGIN * largest for name, largest in found.items()}
            progress(number + 1, layers, "calibrating")
    ranges = make_ranges(source, model, ids, text_digest(text), observer, tensors)
    layer = max(losses, key=losses.__getitem__)
    held_out = {"layer": layer, "loss": round(losses[layer], 1)}
    return replace(ranges, settings={**ranges.settings, "margin": _MARGIN, "held_out": held_out})


def _held_out_loss(model: CausalModel, number: int, projections: list[Projections], observer: Observer) -> float:
    """Return a layer's ratio of held-out to fitted error on the last batch of windows.

    It is the RMS error of keys or values under ranges of all other batches, divided by that under ranges of the last
    batch itself; the larger of the two ratios.
    """
    parts = (projections[:-1], projections[-1:])
    ranges = [compute_layer_ranges(model, number, part, ("k", "v"), observer) for part in parts]
    ratios = []
    for target, states in zip(("k", "v"), projections[-1][-1], strict=True):
        name, values = f"layers.{number}.{target}", flatten_tokens(states)
        seen, fitted = (
            float(rounding_sums(values, margin * of[name], _BITS)[3])
            for margin, of in zip((_MARGIN, 1.0), ranges, strict=True)
        )
        ratios.append(math.sqrt(seen / max(fitted, 1e-30)))
    return max(ratios)


def _prose_windows(source: Source, text: str) -> Tensor:
    """Return token ids [128, at most 16] of windows of one length at equally spaced positions of the text.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one that does not match its vocabulary.
    """
    try:
        tokenizer = source.tokenizer
    except CheckpointError as error:
        raise UsageError(
            f"a quantized KV cache is calibrated on text: {error}; put tokenizer files into the checkpoint's folder"
        ) from error
    config = source.architecture
    length = min(_WINDOW, config.max_position_embeddings)
    part = len(text) // _WINDOWS
    # Eight characters per token are enough, since more than six are rare.
    pieces = [text[i * part : i * part + 8 * length] for i in range(_WINDOWS)]
    windows = [tokenizer(piece)["input_ids"] for piece in pieces]
    shortest = min(length, *map(len, windows))
    read = [window[:shortest] for window in windows]
    for window in read:
        check_tokens(window, config.vocab_size, tokenizer)
    return torch.tensor(read)
