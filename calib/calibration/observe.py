"""Observation of a model's keys, values and attention logits on windows of text, to find their ranges."""

from collections.abc import Collection, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from diffquant.calib.calibration.observers import MagnitudeHistogram, Observer, key_ranges
from diffquant.checkpoints.placement import move_to_compute_device
from diffquant.checkpoints.ranges import Ranges
from diffquant.checkpoints.source import Source
from diffquant.errors import NonFiniteError
from diffquant.family.spec import DiffSpec
from diffquant.model.causal import CausalModel
from diffquant.model.walk import BATCH_TOKENS, iterate_unmasked_logits, split_into_batches
from diffquant.quantization.loading import MODEL_MODULES
from diffquant.recipe.numbers.absmax import is_finite
from diffquant.support.installation import result_version_digest, versions
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, report_nothing

# A layer's rotated queries and keys, its values, and its keys and values as cached, [B, heads, T, width] each.
Projections = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]


def iterate_projections(
    model: CausalModel, ids: Tensor, batch_tokens: int = BATCH_TOKENS
) -> Iterator[list[Projections]]:
    """Run a model layer by layer, and yield each layer's queries, keys and values as a list with an entry per batch.

    The list is empty for a layer without attention. Only one layer's inputs and projections for all windows are in
    memory at a time.

    Args:
        model: model with its recipe applied.
        ids: token ids [N, T] of N windows.
        batch_tokens: largest number of tokens per forward pass.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    runner = model.new_layer_runner(ids.shape[1])
    inputs = [runner.embed(batch) for batch in split_into_batches(ids, batch_tokens)]
    last = len(runner.layers) - 1
    for number, layer in enumerate(runner.layers):
        with move_to_compute_device(layer):
            projected = [(x, runner.project(layer, x)) for x in inputs]
            yield [(*each, runner.cached_keys_and_values(layer, x, each)) for x, each in projected if each is not None]
            if number == last:
                return
            inputs = [runner.run_layer(layer, x) for x in inputs]
        if not all(is_finite(runner.hidden_states(x)) for x in inputs):
            raise NonFiniteError(f"layer {number} computes NaN or infinity; use {option_name('dtype', 'float32')}")


def flatten_tokens(states: Tensor) -> Tensor:
    """Convert keys or values [batch, heads, tokens, width] to float32 [batch·tokens, heads, width]."""
    return states.float().transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
def observe_ranges(
    model: CausalModel, ids: Tensor, targets: Collection[str], observer: Observer, progress: Progress = report_nothing
) -> dict[str, Tensor]:
    """Run a model and return the ranges of its activations, by names such as "layers.0.k".

    Args:
        model: model with its recipe applied.
        ids: token ids [N, T] of N windows.
        targets: activations to observe: "k", "v", "logits".
        observer: rule that turns magnitudes into ranges.

    Returns:
        float32 [key heads, key width] for "k", [value heads, value width] for "v", and [query heads] for "logits".

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    layers = model.config.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    for number, projections in enumerate(iterate_projections(model, ids)):
        tensors |= compute_layer_ranges(model, number, projections, targets, observer)
        progress(number + 1, layers, "calibrating")
    return tensors


def compute_layer_ranges(
    model: CausalModel, number: int, projections: list[Projections], targets: Collection[str], observer: Observer
) -> dict[str, Tensor]:
    """Return the ranges of one layer by names such as "layers.0.k", except those of targets that the layer lacks.

    Args:
        number: index of the layer.
        projections: the layer's list from `iterate_projections`.
        targets: activations to observe: "k", "v", "logits".
        observer: rule that turns magnitudes into ranges.
    """
    own = [target for target in targets if number in model.model.architecture.target_layers[target]]
    spec, ranges = model.config.diff_spec, dict[str, Tensor]()
    if "k" in own:
        keys = torch.cat([flatten_tokens(cached[0]) for *_, cached in projections])
        ranges["k"] = key_ranges(observer, keys, spec).view(keys.shape[1:])
    if "v" in own:
        values = torch.cat([flatten_tokens(cached[1]) for *_, cached in projections])
        ranges["v"] = observer.ranges(values.abs().flatten(1)).view(values.shape[1:])
    if "logits" in own:
        ranges["logits"] = _logit_ranges(projections, observer, spec)
    return {f"layers.{number}.{target}": tensor.cpu() for target, tensor in ranges.items()}


def make_ranges(
    source: Source, model: CausalModel, ids: Tensor, digest: str, observer: Observer, tensors: dict[str, Tensor]
) -> Ranges:
    """Return a `Ranges`: tensors, the checkpoint's fingerprint, and the calibration settings that they depend on.

    Args:
        source: checkpoint of the model.
        ids: token ids [N, T] of the N windows that the model was calibrated on.
        digest: digest of the windows' text.
        tensors: ranges from `observe_ranges`.

    Raises:
        CheckpointError: the checkpoint has changed since it was opened.
    """
    source.check_unchanged()
    settings = {
        "text": digest,
        "tokens": ids.numel(),
        "window": ids.shape[1],
        "observer": asdict(observer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
        # No date and no commit: the file's digest identifies results, so equal ranges must give equal files.
        "code": result_version_digest((*MODEL_MODULES, __name__)),
    }
    return Ranges(source.fingerprint, settings, observer.bits if observer.kind == "mse" else None, tensors)


def _logit_ranges(projections: list[Projections], observer: Observer, spec: DiffSpec) -> Tensor:
    """Return the ranges [query heads] of one layer's logits, in DiffTransformer's head order."""
    heads = [MagnitudeHistogram() for _ in range(spec.layout.query_heads)]
    for queries, keys, *_ in projections:
        for first, block in iterate_unmasked_logits(queries, keys, spec):
            for head, logits in zip(heads, block.unbind(1), strict=True):
                head.add_causal(logits, first)
    counts = torch.stack([head.counts for head in heads])
    largest = torch.cat([head.largest for head in heads])
    return observer.ranges_from_histograms(counts, MagnitudeHistogram.bin_centers(), largest)
