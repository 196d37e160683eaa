"""Simulated low-bit logits: absmax-quantize Q·Kᵀ·scale of each map before its softmax.

The paper (arXiv 2410.05258, section 3.7, Figure 8) quantizes attention logits but does not say which entries share a
scale, so all choices are offered. Scales cover only visible entries and never two sequences, so neither padding nor
batching changes a result. The one exception is "block" with left padding, since tiles are counted from the first
position, padded or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.family.call import Meter
from diffquant.numbers.logit_scales import logit_format
from diffquant.numbers.sharing import Sharing
from diffquant.scheme import Scheme


@dataclass
class LogitMeter:
    """Statistics of a layer's logit quantizer since the last reset.

    Counts stay on their device, since fetching each would synchronize; `report` fetches them.

    Attributes:
        calls: number of attention calls with quantized logits.
        p_calls: number of those with quantized softmax weights.
        entries: number of visible logits rounded, over both maps.
        clipped: how many of them were clipped (only `shift`, static scales and a format's own block scales do that).
        scale_sum, scale_count, scale_max: sum, number and maximum of the scales.
    """

    calls: int = 0
    p_calls: int = 0
    entries: int | Tensor = 0
    clipped: int | Tensor = 0
    scale_sum: float | Tensor = 0.0
    scale_count: int | Tensor = 0
    scale_max: float | Tensor = 0.0

    def count(self, entries: int | Tensor, clipped: int | Tensor) -> None:
        """Add rounded entries and clipped entries."""
        self.entries = self.entries + entries
        self.clipped = self.clipped + clipped

    def record_scales(self, scales: Tensor, largest: Tensor) -> None:
        """Add scales, skipping those whose entries are all zero or hidden."""
        if not scales.numel():
            return
        used = largest > 0
        scales = torch.where(used, scales.detach(), 0.0)
        self.scale_sum = self.scale_sum + scales.sum(dtype=torch.float64)
        self.scale_count = self.scale_count + used.sum()
        self.scale_max = scales.amax().clamp(min=self.scale_max)

    def report(self) -> dict[str, float]:
        """Counts as plain numbers: calls, entries, clipped, and the mean and largest scale.

        Stored results name the scales step_mean and step_max, so these are the keys.
        """
        count = int(self.scale_count)
        return {
            "calls": self.calls,
            "entries": int(self.entries),
            "clipped": int(self.clipped),
            "step_mean": float(self.scale_sum) / count if count else 0.0,
            "step_max": float(self.scale_max),
        }


def prepare_logits(logits: Tensor, visible: Tensor | None, shift: bool) -> Tensor:
    """Logits with hidden entries at 0 and, with `shift`, each row's visible maximum subtracted. In place."""
    if visible is None:
        return logits.sub_(logits.amax(-1, keepdim=True)) if shift else logits
    if shift:
        largest = logits.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        # A row that sees nothing has no maximum; all of it is hidden, so any finite value will do.
        logits.sub_(torch.where(torch.isfinite(largest), largest, 0.0))
    return logits.masked_fill_(~visible, 0.0)


def binds_maps(scheme: Scheme) -> bool:
    """Whether a map's codes depend on the other map of its pair, so that pairs cannot share a noise map."""
    return scheme.quantizes and (scheme.alike or scheme.sharing.binds_pairs)


def to_coded(prepared: Sequence[Tensor], scheme: Scheme) -> list[Tensor]:
    """The tensors to round: each map's logits, or with `alike` their mean and half difference. In place."""
    if not scheme.alike or len(prepared) == 1:
        return list(prepared)
    first, second = prepared
    half = second.sub_(first).div_(2)
    return [first.add_(half), half]


def from_coded(rounded: Sequence[Tensor], scheme: Scheme) -> list[Tensor]:
    """Each map's logits from the rounded tensors; the inverse of `to_coded`."""
    if not scheme.alike or len(rounded) == 1:
        return list(rounded)
    mean, half = rounded
    return [mean - half, mean + half]


def magnitudes(prepared: Sequence[Tensor], scheme: Scheme, ranges: Tensor | None = None) -> list[Tensor]:
    """Largest |logit| of the entries that share a scale, one tensor per map.

    Args:
        prepared: one [B, h, T, S] per map, from `prepare_logits` and `to_coded`; the second has fewer heads if pairs
            share noise maps and `binds_maps` is false.
        scheme: scheme of the logits.
        ranges: calibrated ranges of a static scheme, [heads of all maps], first maps before second ones.

    Returns:
        One tensor a map, broadcastable to it: [B,1,1,1] for tensor and map, [B,h,1,1] for head and pair,
        [1,h,1,1] for static, [B,h,T,1] for row, [B,h,T,S] for block and group (each one's value repeated over it).
    """
    if ranges is not None and scheme.sharing.is_static:
        by_map = ranges.split([logits.shape[1] for logits in prepared])
        return [map_ranges.view(1, -1, 1, 1).to(prepared[0]) for map_ranges in by_map]
    largest = [_largest(logits, scheme.sharing) for logits in prepared]
    # The mean and the half difference have separate ranges, as two maps do.
    is_shared = scheme.sharing.joins_maps and not scheme.alike
    return [torch.stack(largest).amax(0)] * len(largest) if is_shared else largest


def round_logits(prepared: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Round prepared logits to multiples of a scale, in place; `shift` clips below, static scales on both sides."""
    levels = logit_format(scheme.format, scheme.shift).rounded_(prepared.div_(scale))
    if scheme.sharing.is_static:
        levels.clamp_(-scheme.format.largest, scheme.format.largest)
    return levels.mul_(scale)


def count_logits(
    meter: Meter,
    prepared: Sequence[Tensor],
    largest: Sequence[Tensor],
    scales: Sequence[Tensor],
    visible: Tensor | None,
    scheme: Scheme,
    *,
    is_first: bool = True,
) -> None:
    """Count in a meter what rounding will do to prepared logits, one [B, h, T, S] a map, which are not rounded yet.

    A scale counts once, however many entries share it.

    Args:
        meter: meter that counts.
        prepared: from `prepare_logits` and `to_coded`.
        largest, scales: their `magnitudes`, and the scales made of them.
        visible: bool, broadcastable to [B, h, T, S], or None if everything is visible.
        scheme: scheme of the logits.
        is_first: whether these are a call's first queries, with which scales count that span all of them.
    """
    sharing = scheme.sharing
    height, width = sharing.tile or 1, (sharing.size or 1 if sharing.name in ("block", "group") else 1)
    batch, _, length, keys = prepared[0].shape
    heads = sum(logits.shape[1] for logits in prepared)
    seen = batch * length * keys if visible is None else visible.sum() * (batch // visible.shape[0])
    meter.count(seen * heads, 0)
    for logits, top, scale in zip(prepared, largest, scales, strict=True):
        # Absmax scales clip nothing, but those of a format's own blocks are powers of two or floats of few bits.
        if scheme.shift or scheme.sharing.is_static or scheme.format.block:
            reach = logit_format(scheme.format, scheme.shift).reach * scale
            meter.count(0, (logits.abs() > reach).sum())
        if is_first or not (sharing.spans_rows or sharing.is_static):
            meter.record_scales(scale[..., ::height, ::width], top[..., ::height, ::width])


def _largest(logits: Tensor, sharing: Sharing) -> Tensor:
    """Largest |logit| among those of [B, h, T, S] that share a scale in one map, broadcastable to them."""
    if sharing.tile:
        return _tile_magnitude(logits, sharing.tile, sharing.tile)
    if sharing.name == "group":
        return _tile_magnitude(logits, 1, sharing.size or 1)
    rows = logits.abs().amax(-1, keepdim=True)
    return rows.amax(sharing.leading, keepdim=True) if sharing.leading else rows


def _tile_magnitude(logits: Tensor, height: int, width: int) -> Tensor:
    """Largest |logit| of each tile of `height` queries and `width` keys, repeated over the tile."""
    rows, columns = logits.shape[-2:]
    padded = torch.nn.functional.pad(logits.abs(), (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    spread: Tensor = tiles.amax((-1, -3), keepdim=True).expand_as(tiles).flatten(-4, -3).flatten(-2)
    return spread[..., :rows, :columns]
