"""Attention weights by blocks of queries: memory linear in S, while whole maps need T x S."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from diffquant.numbers.absmax import compute_dtype
from diffquant.numbers.logit_scales import logit_format

# Number of logits to hold at once, over maps and heads: enough for efficient matrix products, a few tens of MB.
_BLOCK_ENTRIES = 1 << 21


def attention_weights(call: AttentionCall, first: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of a call, and each map's own, for the queries from `first` on; its meter counts nothing.

    Args:
        call: any call.
        first: first query of interest. Earlier ones are computed only where they share a scale with later ones.

    Returns:
        [B, h, T - first, S], the weight of each value: g·map 1 - λ·map 2, or the only map; and
        [maps, B, h, T - first, S], each map's softmax, a noise map for each of the pairs that share it.
    """
    call = replace(call, meter=None)
    weights, maps = [], []
    for rows, block in softmax_blocks(call, first):
        skipped = slice(max(first - rows.start, 0), None)
        maps.append(torch.stack([each_pairs_noise(x, call.pairs) for x in block])[..., skipped, :])
        weights.append(weigh(call, block, rows)[..., skipped, :])
    whole, whole_maps = ([pad(x, (0, call.keys - x.shape[-1])) for x in blocks] for blocks in (weights, maps))
    return torch.cat(whole, -2), torch.cat(whole_maps, -2)


def softmax_blocks(call: AttentionCall, first: int = 0) -> Iterator[tuple[slice, list[Tensor]]]:
    """Each map's softmax, logits and weights rounded as the call says, by blocks of queries up to the last.

    Where a scale spans rows (tensor, map, head, pair) the logits are computed twice: once for their largest magnitude,
    once to be rounded.

    Yields:
        The queries of a block, the first of which lies at `first` or before it, and one [B, h or n, R, S'] a map, of
        the keys up to the last that one of them may see.
    """
    if binds_maps(call.logits):
        call = call.expanded()
    logits = call.logits
    shared = None
    if logits.sharing.spans_rows:
        by_block = [magnitudes(coded, logits) for _, coded, _ in _coded_blocks(call, 0)]
        shared = [torch.stack(map_magnitudes).amax(0) for map_magnitudes in zip(*by_block, strict=True)]
    for rows, coded, visible in _coded_blocks(call, first):
        if logits.quantizes:
            largest = shared or magnitudes(coded, logits, call.ranges)
            scales = [logit_format(logits.format, logits.shift).scale_of(top) for top in largest]
            if call.meter is not None:
                count_logits(call.meter, coded, largest, scales, visible, logits, is_first=not rows.start)
            for each, scale in zip(coded, scales, strict=True):
                round_logits(each, scale, logits)
        yield rows, [softmax_weights(x, visible, call.p) for x in from_coded(coded, logits)]


def weigh(call: AttentionCall, maps: list[Tensor], rows: slice) -> Tensor:
    """Combine maps of some queries into weights [B, h, R, S'], in place of the first map."""
    weights = maps[0]
    if call.signal_gate is not None:
        weights.mul_(_rows_of(call.signal_gate, rows).to(weights.dtype))
    if call.lam is not None:
        weights.sub_(_rows_of(call.lam, rows).to(weights.dtype) * each_pairs_noise(maps[1], call.pairs))
    return weights


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Product [B, h, T, n] @ [B, h_kv, n, m] without repeating y: a group's queries become rows of one product."""
    batch, heads, length, width = x.shape
    groups = y.shape[1]
    product = x.reshape(batch, groups, heads // groups * length, width) @ y
    return product.view(batch, heads, length, y.shape[-1])


def _coded_blocks(call: AttentionCall, first: int) -> Iterator[tuple[slice, list[Tensor], Tensor | None]]:
    """Blocks of queries from `first` on: their rows, the logits to round, and the visible keys."""
    dtype, scheme = compute_dtype(call.v), call.logits
    q, k = ([x.to(dtype) for x in maps] for maps in (call.q, call.k))
    batch, heads, length, _ = q[0].shape
    tile = scheme.sharing.tile or 1
    size = max(_BLOCK_ENTRIES // (batch * heads * len(q) * call.keys) // tile, 1) * tile
    for start in range(first // tile * tile, length, size):
        rows = slice(start, min(start + size, length))
        reach = call.mask.reach(rows, length, call.keys)
        visible = call.mask.visible(rows, length, call.keys, call.v.device)
        visible = None if visible is None else visible[..., :reach]
        map_logits = [
            grouped_product(queries[:, :, rows], keys[:, :, :reach].mT).mul_(call.scale)
            for queries, keys in zip(q, k, strict=True)
        ]
        yield rows, to_coded([prepare_logits(x, visible, scheme.shift) for x in map_logits], scheme), visible


def _rows_of(weight: Tensor, rows: slice) -> Tensor:
    """λ or the signal gate for a range of queries."""
    return weight[..., rows, :] if weight.dim() > 1 and weight.shape[-2] > 1 else weight
