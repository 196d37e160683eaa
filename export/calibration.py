"""Static scales of a quantized KV cache: calibrated ones, or from a short run of the exported model over text."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diffquant.data import books_text
from diffquant.errors import CheckpointError, UsageError
from diffquant.export.graph.matrix import op_layout
from diffquant.export.graph.source import ExportSource, Scales
from diffquant.export.runtime.session import OnnxModel
from diffquant.family.spec import DiffSpec
from diffquant.numerics import max_code
from diffquant.scheme import Recipe
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source
from diffquant.support.progress import Progress

_WINDOWS, _WINDOW = 4, 512


def static_scales(
    model: OnnxModel, spec: DiffSpec, bits: int, windows: Sequence[Sequence[int]], progress: Progress
) -> dict[int, Scales]:
    """Scales a channel of each layer's keys and values.

    Rotation turns a pair of key channels, by more the later the token: the pair's length is what no
    position exceeds, while its channels' own largest values on short text underestimate.

    Args:
        model: with a cache in the activations' type.
        bits: of the cache to come.
        windows: token ids of the calibration text.
    """
    largest: list[np.ndarray] = []
    for done, window in enumerate(windows):
        ids = np.array([window], np.int64)
        _, cache = model.run(ids, np.ones_like(ids), model.empty_cache(1), outputs=())
        rows = [np.abs(_envelope(part.astype(np.float32), spec, is_key=not i % 2)) for i, part in enumerate(cache)]
        found = [part.max((0, 2), keepdims=True) for part in rows]
        largest = found if not largest else [np.maximum(a, b) for a, b in zip(largest, found, strict=True)]
        progress(done + 1, len(windows), "calibrating the KV cache")
    scales = [np.where(top == 0, 1.0, top / max_code(bits)).astype(np.float32) for top in largest]
    return {layer: (scales[2 * layer], scales[2 * layer + 1]) for layer in range(len(scales) // 2)}


def calibrated_scales(source: ExportSource, ranges: Ranges) -> dict[int, Scales]:
    """Scales from the file that `diffquant calibrate` wrote.

    Raises:
        UsageError: it holds no keys or values, or those of another width.
    """
    bits = source.options.kv_bits
    ranges.check(Recipe.of(kv=f"{bits}:static"))
    order = state_order(source)
    scales = {}
    for layer in range(source.adapter.config.num_hidden_layers):
        pair = []
        for target, places in zip(("k", "v"), order, strict=True):
            flat = np.empty(places.numel(), np.float32)
            flat[places.flatten().numpy()] = ranges.tensors[f"layers.{layer}.{target}"].flatten().numpy()
            pair.append((flat / max_code(bits)).reshape(1, source.spec.kv_pairs, 1, -1))
        scales[layer] = (pair[0], pair[1])
    return scales


def state_order(source: ExportSource) -> tuple[Tensor, Tensor]:
    """Where DiffTransformer's keys [key heads, d] and values [h_kv, dv] lie in an exported layer's flat cache."""
    layout, exported = source.spec.layout, op_layout(source.spec)
    places = []
    for projection in ("k_proj", "v_proj"):
        order = layout.order_as(exported, projection)
        places.append(torch.arange(layout.height(projection)) if order is None else order.argsort())
    keys, values = layout.keys(places[0][None]), layout.values(places[1][None])
    return keys.squeeze(-2), values.squeeze(-2)


def calibration_windows(source: Source, positions: int, vocabulary: int) -> list[list[int]]:
    """Token ids of the built-in prose.

    Raises:
        UsageError: the checkpoint has no tokenizer, or one of another vocabulary.
    """
    try:
        tokenizer = source.tokenizer
    except CheckpointError as error:
        raise UsageError(
            f"a quantized KV cache is calibrated on text: {error}; put the tokenizer's files beside the weights"
        ) from error
    length = min(_WINDOW, positions)
    text = books_text()
    part = len(text) // _WINDOWS
    # Six characters a token and more is rare: each window reads no more of the text than it needs.
    pieces = [text[i * part : i * part + 8 * length] for i in range(_WINDOWS)]
    windows = [tokenizer(piece)["input_ids"][:length] for piece in pieces]
    top = max(max(window) for window in windows)
    if top >= vocabulary:
        raise UsageError(f"the tokenizer beside {source.path} gives token {top}; the model knows {vocabulary}")
    return windows


def _envelope(part: np.ndarray, spec: DiffSpec, is_key: bool) -> np.ndarray:
    """Values [B, h_kv, S, dk], of a rotated key each replaced by the length of its channel pair."""
    if not is_key or spec.rope == "none":
        return part
    if spec.rope == "half" and (spec.maps == 1 or spec.shared_k):
        half = part.shape[-1] // 2
        return np.tile(np.hypot(part[..., :half], part[..., half:]), 2)
    return np.repeat(np.hypot(part[..., 0::2], part[..., 1::2]), 2, -1)
