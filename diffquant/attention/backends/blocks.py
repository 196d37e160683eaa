"""Computes attention in PyTorch by blocks of queries: memory grows with S instead of T x S, as in `naive`.

The backend "blocks" serves calls that no library kernel supports. "simulated" quantizes logits and softmax weights.
"naive" is the reference implementation, with full maps in memory.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from diffquant.attention.logits import (
    largest_magnitudes,
    mask_and_shift_logits,
    round_call_logits,
    rounds_maps_jointly,
    softmax_weights,
    to_mean_and_difference,
)
from diffquant.attention.naive import naive
from diffquant.attention.registry import BACKENDS, Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.heads import repeat_noise_heads
from diffquant.family.norm import pair_norm
from diffquant.recipe.numbers.absmax import computing_dtype

# Most logits in memory at once, over all maps and heads: enough for efficient matrix products, a few tens of MB.
_BLOCK_ENTRIES = 1 << 21


def iterate_softmax_blocks(call: AttentionCall) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the softmax of each map by blocks of queries, with logits and weights quantized as the call requires.

    If queries share a scale (granularity tensor, map, head or pair), the logits are computed twice: first for their
    largest magnitude, then to be quantized.

    Yields:
        The slice of a block's R queries, and one tensor per map over the S' leading keys that these queries may see:
        [B, h, R, S'], or [B, n, R, S'] for n noise heads that pairs share.
    """
    if rounds_maps_jointly(call.logits):
        call = call.expand_noise()
    logits = call.logits
    shared = None
    if logits.sharing.spans_rows:
        by_block = [largest_magnitudes(coded, logits) for _, coded, _ in _coded_blocks(call)]
        shared = [torch.stack(map_magnitudes).amax(0) for map_magnitudes in zip(*by_block, strict=True)]
    for rows, coded, visible in _coded_blocks(call):
        rounded = round_call_logits(call, coded, visible, shared, is_first=not rows.start)
        yield rows, [softmax_weights(x, visible, call.p) for x in rounded]


def combine_maps(call: AttentionCall, maps: list[Tensor], rows: slice) -> Tensor:
    """Compute g·map 1 - λ·map 2, [B, h, R, S'], for the R queries of the slice `rows`, in the first map's memory."""
    weights = maps[0]
    if call.signal_gate is not None:
        weights.mul_(_rows_of(call.signal_gate, rows).to(weights.dtype))
    if call.lam is not None:
        weights.sub_(_rows_of(call.lam, rows).to(weights.dtype) * repeat_noise_heads(maps[1], call.pairs))
    return weights


def multiply_grouped(x: Tensor, y: Tensor) -> Tensor:
    """Compute x [B, h, T, n] @ y [B, h_kv, n, m]; h / h_kv adjacent heads of x share a head of y, without copies."""
    batch, heads, length, width = x.shape
    groups = y.shape[1]
    product = x.reshape(batch, groups, heads // groups * length, width) @ y
    return product.view(batch, heads, length, y.shape[-1])


def _coded_blocks(call: AttentionCall) -> Iterator[tuple[slice, list[Tensor], Tensor | None]]:
    """Yield blocks of queries: their slice, the logits to quantize, and the mask of visible keys."""
    dtype, scheme = computing_dtype(call.v), call.logits
    q, k = ([x.to(dtype) for x in maps] for maps in (call.q, call.k))
    batch, heads, length, _ = q[0].shape
    tile = scheme.sharing.block_size or 1
    size = max(_BLOCK_ENTRIES // (batch * heads * len(q) * call.key_count) // tile, 1) * tile
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        end = call.mask.visible_end(rows, length, call.key_count)
        visible = call.mask.dense_rows(rows, length, call.key_count, call.v.device)
        visible = None if visible is None else visible[..., :end]
        map_logits = [
            multiply_grouped(queries[:, :, rows], keys[:, :, :end].mT).mul_(call.scale)
            for queries, keys in zip(q, k, strict=True)
        ]
        prepared = [mask_and_shift_logits(x, visible, scheme.has_transform("shift")) for x in map_logits]
        yield rows, to_mean_and_difference(prepared, scheme), visible


def _rows_of(weight: Tensor, rows: slice) -> Tensor:
    """Return λ or the signal gate of a range of queries."""
    return weight[..., rows, :] if weight.dim() > 1 and weight.shape[-2] > 1 else weight


def attend_by_blocks(call: AttentionCall) -> Tensor:
    """Compute attention by blocks of queries, including the quantization of its maps and the pair norm.

    Returns:
        [B, h, T, dv] in v's dtype.
    """
    v = call.v
    if call.has_quantized_maps and v.is_cuda and (refusal := BACKENDS["triton-simulated"].refuses(call)):
        warnings.warn(f"quantizing in PyTorch, many times slower than in the Triton kernel: {refusal}", stacklevel=2)
    values = v.to(computing_dtype(v))
    out = torch.empty(*call.q[0].shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for rows, maps in iterate_softmax_blocks(call):
        weights = combine_maps(call, maps, rows)
        out[:, :, rows] = multiply_grouped(weights, values[:, :, : weights.shape[-1]])
    call.record_in_meter()
    return pair_norm(out, call.post)


def _find_refusal(call: AttentionCall) -> str | None:
    return "blocks has no backward pass; use naive, or torch.no_grad()" if call.needs_gradient else None


register(Backend("naive", naive, logits="both"))
register(Backend("blocks", attend_by_blocks, _find_refusal, priority=1))
register(Backend("simulated", attend_by_blocks, logits="quantized", priority=10))
