"""The reference implementation of attention: full T x S maps, in up to float64. Every backend is tested against it."""

from torch import Tensor

from diffquant.attention.logits import (
    mask_and_shift_logits,
    round_call_logits,
    rounds_maps_jointly,
    softmax_weights,
    to_mean_and_difference,
)
from diffquant.family.call import AttentionCall
from diffquant.family.heads import repeat_noise_heads
from diffquant.family.norm import pair_norm
from diffquant.recipe.numbers.absmax import computing_dtype


def naive(call: AttentionCall) -> Tensor:
    """Compute norm((g·softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V); with one map, without the λ term.

    Returns:
        [B, h, T, dv] in v's dtype.

    Source: arXiv 2410.05258, equation 1.
    """
    v, logits, dtype = call.v, call.logits, computing_dtype(call.v)
    visible = call.mask.dense(call.query_count, call.key_count, v.device)
    map_logits = [
        (queries.to(dtype) @ keys.to(dtype).repeat_interleave(queries.shape[1] // v.shape[1], 1).mT) * call.scale
        for queries, keys in zip(call.q, call.k, strict=True)
    ]
    if rounds_maps_jointly(logits):
        map_logits = [repeat_noise_heads(x, call.pairs) for x in map_logits]
    if logits.quantizes:
        prepared = [mask_and_shift_logits(x, visible, logits.has_transform("shift")) for x in map_logits]
        map_logits = round_call_logits(call, to_mean_and_difference(prepared, logits), visible)
    call.record_in_meter()
    maps = [softmax_weights(x, visible, call.p) for x in map_logits]
    weights = maps[0] if call.signal_gate is None else call.signal_gate.to(dtype) * maps[0]
    if call.lam is not None:
        weights = weights - call.lam.to(dtype) * repeat_noise_heads(maps[1], call.pairs)
    values = v.to(dtype).repeat_interleave(call.pairs // v.shape[1], 1)
    return pair_norm((weights @ values).to(v.dtype), call.post)
