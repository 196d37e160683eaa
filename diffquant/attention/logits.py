"""Simulates low-bit maps: absmax-quantizes each map's logits Q·Kᵀ·scale before softmax, and the softmax weights.

The paper (arXiv 2410.05258, section 3.7, Figure 8) quantizes attention logits but does not say which entries share a
scale, so all granularities are offered. A scale depends only on visible entries of one sequence, so neither padding nor
batching changes a result. The exceptions are "block" and "group" with left padding, since tiles and groups of keys are
counted from the first position, including padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.family.call import AttentionCall, LogitMeter
from diffquant.recipe.numbers.sharing import Granularity
from diffquant.recipe.numbers.simulation import logit_format, softmax_weight_scale
from diffquant.recipe.scheme import FULL, Scheme


def mask_and_shift_logits(logits: Tensor, visible: Tensor | None, shift: bool) -> Tensor:
    """Set hidden logits to 0 and, with `shift`, subtract each row's largest visible logit. Works in place."""
    if visible is None:
        return logits.sub_(logits.amax(-1, keepdim=True)) if shift else logits
    if shift:
        largest = logits.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        # A row without visible keys has no maximum; any finite value does, since all its logits are hidden.
        logits.sub_(torch.where(torch.isfinite(largest), largest, 0.0))
    return logits.masked_fill_(~visible, 0.0)


def rounds_maps_jointly(scheme: Scheme) -> bool:
    """Return whether the rounding of a pair's signal map depends on its noise map, and vice versa.

    If so, pairs that share a noise map need separate roundings of it.
    """
    return scheme.quantizes and (scheme.has_transform("alike") or scheme.sharing.is_per_pair)


def to_mean_and_difference(prepared: Sequence[Tensor], scheme: Scheme) -> list[Tensor]:
    """Return the tensors to round.

    They are each map's logits, or with `alike` and two maps the mean of both maps' logits and half their difference,
    which replace the logits in memory.
    """
    if not scheme.has_transform("alike") or len(prepared) == 1:
        return list(prepared)
    first, second = prepared
    half = second.sub_(first).div_(2)
    return [first.add_(half), half]


def from_mean_and_difference(rounded: Sequence[Tensor], scheme: Scheme) -> list[Tensor]:
    """Compute each map's logits from rounded tensors; the inverse of `to_mean_and_difference`."""
    if not scheme.has_transform("alike") or len(rounded) == 1:
        return list(rounded)
    mean, half = rounded
    return [mean - half, mean + half]


def largest_magnitudes(prepared: Sequence[Tensor], scheme: Scheme, ranges: Tensor | None = None) -> list[Tensor]:
    """Compute the largest |logit| among the entries that share a scale, one tensor per map.

    Args:
        prepared: one [B, h, T, S] per map, from `mask_and_shift_logits` and `to_mean_and_difference`; the second has
            fewer heads if pairs share noise maps and `rounds_maps_jointly` is false.
        scheme: scheme of the logits.
        ranges: calibrated ranges of a static scheme, one for each head of the first map, then of the second; else None.

    Returns:
        One tensor per map, broadcastable to it: [B,1,1,1] for tensor and map, [B,h,1,1] for head and pair,
        [1,h,1,1] for static, [B,h,T,1] for row, [B,h,T,S] for block and group (repeated over each block or group).
    """
    if ranges is not None and scheme.sharing.is_static:
        by_map = ranges.split([logits.shape[1] for logits in prepared])
        return [map_ranges.view(1, -1, 1, 1).to(prepared[0]) for map_ranges in by_map]
    largest = [_largest(logits, scheme.sharing) for logits in prepared]
    # With `alike` the tensors are the mean and the half difference, which never share a scale.
    is_shared = scheme.sharing.shares_scale_across_maps and not scheme.has_transform("alike")
    return [torch.stack(largest).amax(0)] * len(largest) if is_shared else largest


def round_logits(prepared: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Round prepared logits to multiples of a scale, in place, and clip codes that the scheme cannot represent."""
    levels = logit_format(scheme.format, scheme.has_transform("shift")).round_to_absmax_levels_(prepared.div_(scale))
    if scheme.sharing.is_static:
        levels.clamp_(-scheme.format.largest, scheme.format.largest)
    return levels.mul_(scale)


def round_call_logits(
    call: AttentionCall,
    prepared: Sequence[Tensor],
    visible: Tensor | None,
    largest: list[Tensor] | None = None,
    *,
    is_first: bool = True,
) -> list[Tensor]:
    """Quantize and dequantize a call's logits in place, add to its meter, and return the logits of each map.

    Args:
        call: call that gives the scheme and the meter; at 16 bits nothing is rounded.
        prepared: one [B, h, T, S] per map, from `mask_and_shift_logits` and `to_mean_and_difference`.
        visible: bool, broadcastable to [B, h, T, S], or None if everything is visible.
        largest: the `largest_magnitudes` of `prepared`, or None to compute them here.
        is_first: whether this is a call's first block of queries; the meter counts scales shared by all queries only
            then.
    """
    scheme = call.logits
    if scheme.quantizes:
        largest = largest or largest_magnitudes(prepared, scheme, call.ranges)
        scales = [logit_format(scheme.format, scheme.has_transform("shift")).scale_for_largest(top) for top in largest]
        if call.meter is not None:
            record_logits(call.meter, prepared, largest, scales, visible, scheme, is_first=is_first)
        prepared = [round_logits(x, scale, scheme) for x, scale in zip(prepared, scales, strict=True)]
    return from_mean_and_difference(prepared, scheme)


def record_logits(
    meter: LogitMeter,
    prepared: Sequence[Tensor],
    largest: Sequence[Tensor],
    scales: Sequence[Tensor],
    visible: Tensor | None,
    scheme: Scheme,
    *,
    is_first: bool = True,
) -> None:
    """Add to a meter the statistics of prepared logits that are about to be rounded.

    Each scale is counted once, however many entries share it.

    Args:
        meter: meter to add to.
        prepared: one [B, h, T, S] per map, from `mask_and_shift_logits` and `to_mean_and_difference`.
        largest, scales: the `largest_magnitudes` of `prepared`, and the scales computed from them.
        visible: bool, broadcastable to [B, h, T, S], or None if everything is visible.
        scheme: scheme of the logits.
        is_first: whether this is a call's first block of queries; scales shared by all queries are counted only then.
    """
    sharing = scheme.sharing
    height, width = sharing.block_size or 1, (sharing.size or 1 if sharing.name in ("block", "group") else 1)
    batch, _, length, keys = prepared[0].shape
    heads = sum(logits.shape[1] for logits in prepared)
    seen = batch * length * keys if visible is None else visible.sum() * (batch // visible.shape[0])
    meter.add_counts(seen * heads, 0)
    for logits, top, scale in zip(prepared, largest, scales, strict=True):
        # Absmax scales clip nothing, but block formats round their scales to powers of two or to low-bit floats.
        if scheme.has_transform("shift") or scheme.sharing.is_static or scheme.format.block:
            clip_limit = logit_format(scheme.format, scheme.has_transform("shift")).clip_limit * scale
            meter.add_counts(0, (logits.abs() > clip_limit).sum())
        if is_first or not (sharing.spans_rows or sharing.is_static):
            meter.record_scales(scale[..., ::height, ::width], top[..., ::height, ::width])


def _largest(logits: Tensor, sharing: Granularity) -> Tensor:
    """Compute the largest |logit| among the entries of one map [B, h, T, S] that share a scale, broadcastable to it."""
    if sharing.block_size:
        return _tile_magnitude(logits, sharing.block_size, sharing.block_size)
    if sharing.name == "group":
        return _tile_magnitude(logits, 1, sharing.size or 1)
    rows = logits.abs().amax(-1, keepdim=True)
    return rows.amax(sharing.shared_leading_axes, keepdim=True) if sharing.shared_leading_axes else rows


def _tile_magnitude(logits: Tensor, height: int, width: int) -> Tensor:
    """Compute the largest |logit| of each tile of `height` queries and `width` keys, repeated over the tile."""
    rows, columns = logits.shape[-2:]
    padded = pad(logits.abs(), (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    spread: Tensor = tiles.amax((-1, -3), keepdim=True).expand_as(tiles).flatten(-4, -3).flatten(-2)
    return spread[..., :rows, :columns]


def softmax_weights(logits: Tensor, visible: Tensor | None, scheme: Scheme = FULL) -> Tensor:
    """Compute the softmax of logits over the visible keys, with quantized weights; 0 for a row without visible keys.

    Weights are quantized before they are divided by their row's sum, while they lie in [0, 1] and the largest is 1. So
    per-row scales are equal for all rows, and the tensor scale of a format such as NVFP4 is known beforehand. The
    divisor is the sum of the quantized weights, so that a row still sums to 1 and errors common to a row cancel
    (quantizing before normalizing, AMD-AGI/ALTO #40). With `fullsum` it is the sum of the unquantized weights, as in
    published kernels: FlashAttention-3 (arXiv 2407.08608; hopper/softmax.h), SageAttention 2 and 3 (arXiv 2411.10958
    and 2505.11594) and ModelOpt's p_bmm_quantizer. Those kernels round relative to the running maximum of a row; here
    weights are relative to the row's final maximum.

    Args:
        logits: [B, heads, T, S].
        visible: bool, broadcastable to `logits`, or None if everything is visible.
        scheme: scheme of the weights, with one scale per row or per group of `size` keys, counted from the first key.

    Returns:
        The weights in the dtype of the logits. Each row sums to 1, except with `fullsum`.
    """
    masked = logits if visible is None else torch.where(visible, logits, -torch.inf)
    if not scheme.quantizes:
        weights = masked.softmax(-1)
        return weights if visible is None else weights.nan_to_num(0.0)
    if not masked.numel():
        return masked
    largest = masked.amax(-1, keepdim=True)
    weights = (masked - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    rounded = _round_weights(weights, scheme)
    total = (weights if scheme.has_transform("fullsum") else rounded).sum(-1, keepdim=True)
    return rounded / total.masked_fill(total == 0, 1.0)


def _round_weights(weights: Tensor, scheme: Scheme) -> Tensor:
    """Quantize and dequantize unnormalized softmax weights [..., S]."""
    if scheme.granularity == "row":
        scale = softmax_weight_scale(scheme.format, scheme.has_transform("pow2"), weights.dtype)
        return scheme.format.simulate(weights, scale.to(weights))
    number_format = scheme.format.with_tensor_scale(torch.ones(1))
    keys, size = weights.shape[-1], scheme.granularity_size or 1
    groups = pad(weights, (0, -keys % size)).unflatten(-1, (-1, size))
    return number_format.simulate(groups, number_format.compute_scale(groups, -1)).flatten(-2)[..., :keys]
