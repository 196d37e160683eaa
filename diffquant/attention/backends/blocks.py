"""Attention in PyTorch by blocks of queries, for calls that no ready-made attention serves; memory linear in S."""

import torch
from torch import Tensor

from diffquant.attention.registry import Backend, register
from diffquant.attention.weights import grouped_product, softmax_blocks, weigh
from diffquant.family.call import AttentionCall
from diffquant.family.norm import pair_norm
from diffquant.numbers.absmax import compute_dtype


def by_blocks(call: AttentionCall) -> Tensor:
    """Attention of a call, with its logit rounding and pair norm, in memory linear in S."""
    v = call.v
    values = v.to(compute_dtype(v))
    out = torch.empty(*call.q[0].shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for rows, maps in softmax_blocks(call):
        out[:, :, rows] = grouped_product(weigh(call, maps, rows), values)
    return pair_norm(out, call.post)


def _refuses(call: AttentionCall) -> str | None:
    return "it has no backward pass; use naive" if call.needs_gradient else None


register(Backend("blocks", by_blocks, _refuses, priority=1))
