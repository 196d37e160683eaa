"""The reference implementation, with full T x S maps in up to float64; every fast path is tested against it."""

from torch import Tensor

from diffquant.attention.logits import (
    binds_maps,
    count_logits,
    from_coded,
    magnitudes,
    prepare_logits,
    round_logits,
    to_coded,
)
from diffquant.attention.probabilities import softmax_weights
from diffquant.family.call import AttentionCall
from diffquant.family.heads import each_pairs_noise
from diffquant.family.norm import pair_norm
from diffquant.numbers.absmax import compute_dtype
from diffquant.numbers.logit_scales import logit_format


def naive(call: AttentionCall) -> Tensor:
    """Pair norm of (g·softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V, or of its first term with one map.

    Returns:
        [B, h, T, dv] in v's dtype.

    Source: arXiv 2410.05258, equation 1.
    """
    v, logits, dtype = call.v, call.logits, compute_dtype(call.v)
    visible = call.mask.dense(call.length, call.keys, v.device)
    map_logits = [
        (queries.to(dtype) @ keys.to(dtype).repeat_interleave(queries.shape[1] // v.shape[1], 1).mT) * call.scale
        for queries, keys in zip(call.q, call.k, strict=True)
    ]
    if binds_maps(logits):
        map_logits = [each_pairs_noise(x, call.pairs) for x in map_logits]
    if logits.quantizes:
        coded = to_coded([prepare_logits(x, visible, logits.shift) for x in map_logits], logits)
        largest = magnitudes(coded, logits, call.ranges)
        scales = [logit_format(logits.format, logits.shift).scale_of(top) for top in largest]
        if call.meter is not None:
            count_logits(call.meter, coded, largest, scales, visible, logits)
        rounded = [round_logits(x, scale, logits) for x, scale in zip(coded, scales, strict=True)]
        map_logits = from_coded(rounded, logits)
    call.count()
    maps = [softmax_weights(x, visible, call.p) for x in map_logits]
    weights = maps[0] if call.signal_gate is None else call.signal_gate.to(dtype) * maps[0]
    if call.lam is not None:
        weights = weights - call.lam.to(dtype) * each_pairs_noise(maps[1], call.pairs)
    values = v.to(dtype).repeat_interleave(call.pairs // v.shape[1], 1)
    return pair_norm((weights @ values).to(v.dtype), call.post)
