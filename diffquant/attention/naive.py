"""Differential attention in its plain form, full T x S maps good to float64; every fast path is held to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffquant.attention.logits import (
    binds_maps,
    from_coded,
    magnitudes,
    prepare_logits,
    record_logits,
    round_logits,
    to_coded,
)
from diffquant.family.call import Meter
from diffquant.family.heads import each_pairs_noise
from diffquant.family.mask import Mask
from diffquant.numbers.absmax import compute_dtype
from diffquant.numbers.logit_scales import logit_scale
from diffquant.scheme import FULL, Scheme


def naive(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    scale: float,
    mask: Mask,
    logits: Scheme = FULL,
    ranges: Tensor | None = None,
    meter: Meter | None = None,
    signal_gate: Tensor | None = None,
) -> Tensor:
    """Differential attention, (g·softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V, or its first term alone.

    Args:
        q: one [B, h, T, d] a map, one or two maps; the second [B, n, T, d] where h / n pairs share a noise head.
        k: one [B, h_kv, S, d] a map; h_kv divides n.
        v: [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.
        scale: factor of Q·Kᵀ.
        mask: which keys a query sees; a query that sees none gives 0.
        logits: simulated quantization of both maps' logits.
        ranges: largest logits [h], or [h + n], of a static scheme.
        meter: counter of what is rounded; None for none.
        signal_gate: factor g of the signal map, broadcastable to [B, h, T, 1]; None for 1.

    Returns:
        [B, h, T, dv] in v's dtype.

    Source: arXiv 2410.05258, equation 1.
    """
    dtype = compute_dtype(v)
    pairs, kv_pairs = q[0].shape[1], v.shape[1]
    visible = mask.dense(q[0].shape[2], v.shape[2], v.device)
    map_logits = [
        (queries.to(dtype) @ keys.to(dtype).repeat_interleave(queries.shape[1] // kv_pairs, 1).mT) * scale
        for queries, keys in zip(q, k, strict=True)
    ]
    if binds_maps(logits):
        map_logits = [each_pairs_noise(x, pairs) for x in map_logits]
    if logits.quantizes:
        coded = to_coded([prepare_logits(x, visible, logits.shift) for x in map_logits], logits)
        largest = magnitudes(coded, logits, ranges)
        if meter is not None:
            meter.calls += 1
            record_logits(meter, coded, largest, visible, logits)
        rounded = [
            round_logits(x, logit_scale(top, logits.format, logits.shift), logits)
            for x, top in zip(coded, largest, strict=True)
        ]
        map_logits = from_coded(rounded, logits)
    maps = [masked_softmax(x, visible) for x in map_logits]
    signal = maps[0] if signal_gate is None else signal_gate.to(dtype) * maps[0]
    weights = signal if lam is None else signal - lam.to(dtype) * each_pairs_noise(maps[1], pairs)
    return (weights @ v.to(dtype).repeat_interleave(pairs // kv_pairs, 1)).to(v.dtype)


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax of [..., S] logits over the visible keys; a row that sees none is all zero."""
    if visible is None:
        return logits.softmax(-1)
    return logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
