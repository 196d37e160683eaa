"""Calibration of keys and values on a little built-in prose, which an export with a quantized cache needs."""

from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.observe import observe_ranges, to_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.data import books_text
from diffquant.errors import CheckpointError, UsageError
from diffquant.loading import load_by_layer
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.recipe import Recipe
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source, open_source
from diffquant.support.progress import Progress, silent
from diffquant.text.prompts import check_tokens

_WINDOWS, _WINDOW = 4, 512


def calibrate_cache(
    path: Path | str | Source, recipe: Recipe | None = None, ids: Tensor | None = None, progress: Progress = silent
) -> Ranges:
    """Ranges of K and V that no magnitude of the observed text exceeds, for every width of the cache.

    Args:
        path: checkpoint, plain or quantized.
        recipe: recipe of the model that will use the cache, for weights and logits; 16 bits by default, or the weights
            of a quantized checkpoint.
        ids: [N, T] windows to observe; windows of the built-in prose by default.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one of another vocabulary.
        NonFiniteError: the model computes NaN or infinity.
    """
    source, text = open_source(path), ""
    source.check_taken("calibrate", SambaYArchitecture, Motif3Architecture)
    if ids is None:
        text = books_text()
        ids = _prose_windows(source, text)
    model = load_by_layer(source, recipe or Recipe())
    # A window at a time: its maps and states are most of what this holds.
    tensors = observe_ranges(model, ids, ("k", "v"), Observer("absmax"), ids.shape[1], progress)
    return to_ranges(source, model, ids, text, Observer("absmax"), tensors)


def _prose_windows(source: Source, text: str) -> Tensor:
    """Token ids [4, at most 512] from four places of the text, all of one length.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one of another vocabulary.
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
    # Six characters a token and more is rare: each window reads no more of the text than it needs.
    pieces = [text[i * part : i * part + 8 * length] for i in range(_WINDOWS)]
    windows = [tokenizer(piece)["input_ids"] for piece in pieces]
    shortest = min(length, *map(len, windows))
    read = [window[:shortest] for window in windows]
    for window in read:
        check_tokens(window, config.vocab_size, tokenizer)
    return torch.tensor(read)
