"""Observation of a model's keys, values and attention logits on windows of text, which gives their ranges."""

from collections.abc import Collection
from dataclasses import asdict

import torch
from torch import Tensor

from diffquant.calib.calibration.layers import Projections, by_token, projected_layers
from diffquant.calib.calibration.observers import Observer, key_ranges
from diffquant.calib.statistics import Magnitudes
from diffquant.family.spec import DiffSpec
from diffquant.model.causal import CausalModel
from diffquant.model.walk import causal_logits
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source
from diffquant.support.code import code_digest
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions
from diffquant.text.corpus import text_digest

# Tokens that a layer sees in one pass.
BATCH_TOKENS = 4096


@torch.inference_mode()
def observe_ranges(
    model: CausalModel,
    ids: Tensor,
    targets: Collection[str],
    observer: Observer,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    """Observed ranges by the names that a `Ranges` file gives them, "layers.N.k" and so on, of layers that have any.

    Args:
        model: model under the recipe whose activations are to be observed.
        ids: [N, T] windows.
        targets: activations to observe: "k", "v", "logits".
        observer: rule from magnitudes to ranges.
        batch_tokens: most tokens of one pass.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    spec, layers = model.config.diff_spec, model.config.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    for number, projections in enumerate(projected_layers(model, ids, batch_tokens)):
        own = [target for target in targets if number in model.model.architecture.target_layers[target]]
        ranges = _layer_ranges(projections, own, observer, spec)
        tensors |= {f"layers.{number}.{target}": _nonzero(tensor).cpu() for target, tensor in ranges.items()}
        progress(number + 1, layers, "calibrating")
    return tensors


def _nonzero(ranges: Tensor) -> Tensor:
    """Ranges with 1 where nothing but zeros was seen, whose codes are zero at any scale."""
    return torch.where(ranges == 0, 1.0, ranges)


def to_ranges(
    source: Source, model: CausalModel, ids: Tensor, text: str, observer: Observer, tensors: dict[str, Tensor]
) -> Ranges:
    """The ranges that `observe_ranges` gave for a checkpoint, with the settings that they depend on.

    Args:
        ids: [N, T] windows that were observed.
        text: text that the windows were cut from; "" if they are no text.

    Raises:
        CheckpointError: the checkpoint changed since it was opened.
    """
    source.check_unchanged()
    settings = {
        "text": text_digest(text),
        "tokens": ids.numel(),
        "window": ids.shape[1],
        "observer": asdict(observer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
        # No date and no commit: a file of ranges is part of a cell's address, and the same ranges make the same file.
        "code": code_digest((__name__,)),
    }
    return Ranges(source.fingerprint, settings, observer.bits if observer.kind == "mse" else None, tensors)


def _layer_ranges(
    projections: list[Projections], targets: Collection[str], observer: Observer, spec: DiffSpec
) -> dict[str, Tensor]:
    """Ranges k [key heads, d], v [h_kv, dv] and logits [query heads] of one layer, those that are targets."""
    ranges = {}
    if "k" in targets:
        keys = torch.cat([by_token(each.cached[0]) for each in projections])
        ranges["k"] = key_ranges(observer, keys, spec).view(keys.shape[1:])
    if "v" in targets:
        values = torch.cat([by_token(each.cached[1]) for each in projections])
        ranges["v"] = observer.ranges(values.abs().flatten(1)).view(values.shape[1:])
    if "logits" in targets:
        ranges["logits"] = _logit_ranges(projections, observer, spec)
    return ranges


def _logit_ranges(projections: list[Projections], observer: Observer, spec: DiffSpec) -> Tensor:
    """Ranges [query heads] of one layer's logits, in canonical order."""
    heads = [Magnitudes() for _ in range(spec.layout.query_heads)]
    for each in projections:
        for first, block in causal_logits(each.queries, each.keys, spec):
            for head, logits in zip(heads, block.unbind(1), strict=True):
                head.add_causal(logits, first)
    return observer.ranges_of_counts(
        torch.stack([head.counts for head in heads]), Magnitudes.values(), torch.cat([head.largest for head in heads])
    )
