"""Simulated low-bit logits in PyTorch by blocks of queries: memory linear in S where `naive` needs T x S."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from diffquant.attention.naive import masked_softmax
from diffquant.attention.registry import BACKENDS, Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.heads import each_pairs_noise
from diffquant.family.mask import Mask
from diffquant.family.norm import pair_norm
from diffquant.numbers.absmax import compute_dtype
from diffquant.numbers.logit_scales import logit_scale
from diffquant.scheme import Scheme

# Logits held at once, over maps and heads: large enough for full matrix products, a few tens of MB.
_BLOCK_ENTRIES = 1 << 21


def simulated(call: AttentionCall) -> Tensor:
    """Attention of a call with quantized logits, and the pair norm behind it, in memory linear in S.

    Where a scale spans rows (tensor, map, head, pair) the logits are computed twice: once for their
    largest magnitude, once to be rounded.
    """
    if call.v.is_cuda and (refusal := BACKENDS["triton-simulated"].refuses(call)):
        warnings.warn(f"logits are quantized in PyTorch, many times slower than in a kernel: {refusal}", stacklevel=2)
    if binds_maps(call.logits):
        call = call.expanded()
    v, lam, logits, meter = call.v, call.lam, call.logits, call.meter
    dtype = compute_dtype(v)
    blocks = _Blocks([x.to(dtype) for x in call.q], [x.to(dtype) for x in call.k], call.scale, call.mask, logits)
    shared = _largest_over_rows(blocks, logits) if logits.sharing.spans_rows else None
    values = v.to(dtype)
    out = torch.empty(*call.q[0].shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for rows, prepared, visible in blocks:
        largest = shared or magnitudes(prepared, logits, call.ranges)
        if meter is not None:
            record_logits(meter, prepared, largest, visible, logits)
        rounded = [
            round_logits(x, logit_scale(top, logits.format, logits.shift), logits)
            for x, top in zip(prepared, largest, strict=True)
        ]
        maps = [masked_softmax(x, visible) for x in from_coded(rounded, logits)]
        if call.signal_gate is not None:
            maps[0].mul_(_rows_of(call.signal_gate, rows).to(dtype))
        if lam is not None:
            maps[0].sub_(_rows_of(lam, rows).to(dtype) * each_pairs_noise(maps[1], call.pairs))
        weights = maps[0]
        out[:, :, rows] = _grouped_product(weights, values)
    if meter is not None:
        meter.calls += 1
    return pair_norm(out, call.post)


@dataclass
class _Blocks:
    """Logits by blocks of queries: iterates over (rows, what is rounded of their logits, what the rows see)."""

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    scale: float
    mask: Mask
    logits: Scheme

    def __iter__(self) -> Iterator[tuple[slice, list[Tensor], Tensor | None]]:
        batch, heads, length, _ = self.q[0].shape
        keys = self.k[0].shape[2]
        tile = self.logits.sharing.tile or 1
        fitting = _BLOCK_ENTRIES // (batch * heads * len(self.q) * keys)
        size = max(fitting // tile, 1) * tile
        for start in range(0, length, size):
            rows = slice(start, min(start + size, length))
            visible = self.mask.visible(rows, length, keys, self.q[0].device)
            map_logits = [
                _grouped_product(queries[:, :, rows], map_keys.mT).mul_(self.scale)
                for queries, map_keys in zip(self.q, self.k, strict=True)
            ]
            prepared = [prepare_logits(x, visible, self.logits.shift) for x in map_logits]
            yield rows, to_coded(prepared, self.logits), visible


def _largest_over_rows(blocks: _Blocks, logits: Scheme) -> list[Tensor]:
    """Each map's `magnitudes` where a scale spans all rows."""
    by_block = [magnitudes(prepared, logits) for _, prepared, _ in blocks]
    return [torch.stack(map_magnitudes).amax(0) for map_magnitudes in zip(*by_block, strict=True)]


def _grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Product [B, h, T, n] @ [B, h_kv, n, m] that does not repeat y: a group's queries become rows of one product."""
    batch, heads, length, width = x.shape
    groups = y.shape[1]
    product = x.reshape(batch, groups, heads // groups * length, width) @ y
    return product.view(batch, heads, length, y.shape[-1])


def _rows_of(weight: Tensor, rows: slice) -> Tensor:
    """λ, or the signal's gate, of a range of the queries."""
    return weight[..., rows, :] if weight.dim() == 4 and weight.shape[-2] > 1 else weight


register(Backend("simulated", simulated, logits="quantized", priority=10))
