"""Attention in PyTorch by blocks of queries, in memory linear in S, while `naive` needs T x S.

It is "blocks" for calls that no ready-made attention serves, and "simulated" for low-bit logits and softmax weights.
"""

import warnings

import torch
from torch import Tensor

from diffquant.attention.registry import BACKENDS, Backend, register
from diffquant.attention.weights import grouped_product, softmax_blocks, weigh
from diffquant.family.call import AttentionCall
from diffquant.family.norm import pair_norm
from diffquant.numbers.absmax import compute_dtype


def by_blocks(call: AttentionCall) -> Tensor:
    """Attention of a call, with the rounding of its maps and its pair norm."""
    v = call.v
    if call.rounds_maps and v.is_cuda and (refusal := BACKENDS["triton-simulated"].refuses(call)):
        warnings.warn(f"maps are quantized in PyTorch, many times slower than in a kernel: {refusal}", stacklevel=2)
    values = v.to(compute_dtype(v))
    out = torch.empty(*call.q[0].shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for rows, maps in softmax_blocks(call):
        weights = weigh(call, maps, rows)
        out[:, :, rows] = grouped_product(weights, values[:, :, : weights.shape[-1]])
    call.count()
    return pair_norm(out, call.post)


def _refuses(call: AttentionCall) -> str | None:
    return "it has no backward pass; use naive, or torch.no_grad() where none follows" if call.needs_gradient else None


register(Backend("blocks", by_blocks, _refuses, priority=1))
register(Backend("simulated", by_blocks, logits="quantized", priority=10))
