"""Calibration of keys and values on a little bundled text, for exports with a quantized cache."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.observe import compute_layer_ranges, iterate_projections, make_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import check_tokens, text_digest
from diffquant.data import books_text
from diffquant.errors import CheckpointError, UsageError
from diffquant.quantization.loading import load_by_layer
from diffquant.recipe import Recipe
from diffquant.support.progress import Progress, report_nothing

# Keys and values within a window are similar, above all if attention is flat: many short windows are more varied than a
# few long ones with as many tokens.
_WINDOWS, _WINDOW = 128, 16
# Factor of calibrated ranges: a clipped key or value costs far more than a range that is a tenth too wide.
_MARGIN = 1.1
# Tokens per forward pass of a layer.
_BATCH_TOKENS = 512


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
    layers = source.architecture.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode():
        for number, projections in enumerate(iterate_projections(model, ids, _BATCH_TOKENS)):
            found = compute_layer_ranges(model, number, projections, ("k", "v"), observer)
            tensors |= {name: _MARGIN * largest for name, largest in found.items()}
            progress(number + 1, layers, "calibrating")
    ranges = make_ranges(source, model, ids, text_digest(text), observer, tensors)
    return replace(ranges, settings={**ranges.settings, "margin": _MARGIN})


def _prose_windows(source: Source, text: str) -> Tensor:
    """Return token ids [128, at most 16] of windows of one length at equally spaced positions of the text.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one that does not match its vocabulary.
    """
    try:
        tokenizer = source.tokenizer
    except CheckpointError as error:
        raise UsageError(
            f"a quantized KV cache is calibrated on text: {error}; put the tokenizer's files beside the weights"
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
