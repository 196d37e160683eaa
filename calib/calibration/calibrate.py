"""The verb: ranges of K, V, logits and hidden states from one half of a text, reported on the other half."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.fit import Fit, Loss
from diffquant.calib.calibration.observers import Observer, key_ranges
from diffquant.calib.statistics import Magnitudes
from diffquant.errors import NonFiniteError, UsageError
from diffquant.loading import load
from diffquant.model.modeling import DiffLayer, DiffTransformer
from diffquant.model.walk import Walk, batches, causal_logits, visible_entries
from diffquant.scheme import Recipe
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import check_device, resolve
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions
from diffquant.text.corpus import identity, load_text
from diffquant.text.tokens import token_windows

TARGETS = ("k", "v", "logits", "hidden")


@dataclass(frozen=True)
class CalibrationOptions:
    """What is observed and on what.

    Attributes:
        targets: of `TARGETS`.
        observer: from magnitudes to ranges.
        text: one half is observed, the other reported on; the prose that ships by default.
        tokens: of the text, at most, over both halves.
        window: tokens that the model sees at once.
        dtype, device: of the run.
        batch_tokens: most tokens of one pass.
    """

    targets: tuple[str, ...] = TARGETS
    observer: Observer = field(default_factory=Observer)
    text: Path | None = None
    tokens: int = 16384
    window: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    batch_tokens: int = 4096

    def __post_init__(self) -> None:
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; known are {', '.join(TARGETS)}")


def calibrate(
    path: Path | Source, options: CalibrationOptions, progress: Progress = silent
) -> tuple[Ranges, list[Fit]]:
    """Ranges found on the first half of the text's windows, and how they fit the second.

    Raises:
        UsageError: a text of fewer than two windows, or a device that is not there.
        NonFiniteError: the model computes NaN or infinity.
    """
    check_device(options.device)
    text = load_text(options.text)
    source = open_source(path)
    tokenizer = source.tokenizer
    model = load(source, Recipe(), resolve(options.dtype, options.device), options.device)
    ids = token_windows(model, tokenizer, text, options.window, options.tokens)
    if len(ids) < 2:
        raise UsageError(
            f"the text holds one window of {options.window} tokens; two are needed, to calibrate on and to report on"
        )
    half = (len(ids) + 1) // 2
    tensors, fits = observe(model, ids[:half], ids[half:], options, progress)
    observer = options.observer
    settings = {
        "text": identity(text),
        "tokens": half * options.window,
        "window": options.window,
        "observer": asdict(observer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }
    bits = observer.bits if observer.kind == "mse" else None
    return Ranges(source.fingerprint, settings, bits, tensors), fits


@torch.inference_mode()
def observe(
    model: DiffTransformer, ids: Tensor, held_out: Tensor, options: CalibrationOptions, progress: Progress = silent
) -> tuple[dict[str, Tensor], list[Fit]]:
    """Ranges by name, and their fit, layer by layer: what is held are all states and one layer's keys and values.

    Args:
        ids: [N, T] windows to find ranges on.
        held_out: [M, T] windows to report on.
    """
    walk = Walk.over(model, ids.shape[1])
    parts = [_Text(walk, each, options.batch_tokens) for each in (ids, held_out)]
    ranges: dict[str, Tensor] = {}
    fits: list[Fit] = []
    for number, layer in enumerate(walk.layers):
        found = _ranges(parts[0], layer, options)
        losses = _losses(parts[1], layer, found, options)
        for part in parts:
            part.advance(layer)
        if "hidden" in options.targets:
            found["hidden"] = options.observer.ranges(_hidden(parts[0]).flatten()[:, None])
            losses["hidden"] = Loss().add(_hidden(parts[1]), found["hidden"], options.observer.bits)
        ranges |= {f"layers.{number}.{target}": found[target].cpu() for target in options.targets}
        fits += [losses[target].fit(number, target) for target in options.targets]
        progress(number + 1, len(walk.layers), "calibrating")
    return ranges, fits


class _Text:
    """Windows on their way through the layers."""

    def __init__(self, walk: Walk, ids: Tensor, batch_tokens: int) -> None:
        self.walk = walk
        self.states = [walk.embed(batch) for batch in batches(ids, batch_tokens)]

    def advance(self, layer: DiffLayer) -> None:
        self.states = [self.walk.run(layer, x) for x in self.states]
        if not all(torch.isfinite(x.sum(dtype=torch.float64)) for x in self.states):
            raise NonFiniteError(f"layer {layer.self_attn.layer} computes NaN or infinity; use --dtype float32")

    def projected(self, layer: DiffLayer) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [self.walk.project(layer, x) for x in self.states]


def _ranges(part: _Text, layer: DiffLayer, options: CalibrationOptions) -> dict[str, Tensor]:
    """k [key heads, d], v [h_kv, dv] and logits [maps·h] of one layer."""
    spec, observer = layer.self_attn.spec, options.observer
    projected = part.projected(layer)
    found = {}
    if "k" in options.targets:
        keys = torch.cat([_tokens(k) for _, k, _ in projected])
        found["k"] = key_ranges(observer, keys, spec).view(keys.shape[1:])
    if "v" in options.targets:
        values = torch.cat([_tokens(v) for _, _, v in projected])
        found["v"] = observer.ranges(values.abs().flatten(1)).view(values.shape[1:])
    if "logits" in options.targets:
        heads = [_HeadLogits() for _ in range(spec.query_heads)]
        for q, k, _ in projected:
            for first, block in causal_logits(q, k, spec):
                seen = block.abs_().tril_(first)
                for head, each in zip(heads, seen.unbind(1), strict=True):
                    head.add(each)
        found["logits"] = observer.ranges_of_counts(
            torch.stack([head.counts.counts for head in heads]),
            Magnitudes.values(),
            torch.stack([head.largest for head in heads]),
        )
    return found


def _losses(
    part: _Text, layer: DiffLayer, ranges: Mapping[str, Tensor], options: CalibrationOptions
) -> dict[str, Loss]:
    bits, spec = options.observer.bits, layer.self_attn.spec
    losses = {target: Loss() for target in ranges}
    for q, k, v in part.projected(layer):
        if "k" in ranges:
            losses["k"].add(_tokens(k), ranges["k"], bits)
        if "v" in ranges:
            losses["v"].add(_tokens(v), ranges["v"], bits)
        if "logits" in ranges:
            for first, block in causal_logits(q, k, spec):
                losses["logits"].add(block.tril_(first), ranges["logits"][:, None, None], bits)
                batch, heads, rows, keys = block.shape
                losses["logits"].count -= block.numel() - visible_entries(batch * heads, rows, keys)
    return losses


def _hidden(part: _Text) -> Tensor:
    return torch.cat([x.float().abs().flatten(0, 1) for x in part.states])


def _tokens(states: Tensor) -> Tensor:
    """[B, H, T, d] -> float32 [B·T, H, d]."""
    return states.float().transpose(1, 2).flatten(0, 1)


class _HeadLogits:
    """One head's logits so far."""

    def __init__(self) -> None:
        self.counts = Magnitudes()
        self.largest = torch.zeros(())

    def add(self, seen: Tensor) -> None:
        """seen [B, R, S]: magnitudes of a block, 0 where hidden."""
        rows, keys = seen.shape[-2:]
        self.counts.add(seen.contiguous(), seen.numel() - visible_entries(len(seen), rows, keys))
        self.largest = self.largest.maximum(seen.amax().cpu())
