"""Simulated low-bit logits in PyTorch by blocks of queries: memory linear in S where `naive` needs T x S."""

import warnings

import torch
from torch import Tensor

from diffquant.attention.registry import BACKENDS, Backend, register
from diffquant.attention.weights import grouped_product, softmax_blocks, weigh
from diffquant.family.call import AttentionCall
from diffquant.family.norm import pair_norm
from diffquant.numbers.absmax import compute_dtype


def simulated(call: AttentionCall) -> Tensor:
    """Attention of a call with quantized logits, and the pair norm behind it, in memory linear in S."""
    if call.v.is_cuda and (refusal := BACKENDS["triton-simulated"].refuses(call)):
        warnings.warn(f"logits are quantized in PyTorch, many times slower than in a kernel: {refusal}", stacklevel=2)
    v = call.v
    values = v.to(compute_dtype(v))
    out = torch.empty(*call.q[0].shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for rows, maps in softmax_blocks(call):
        out[:, :, rows] = grouped_product(weigh(call, maps, rows), values)
    if call.meter is not None:
        call.meter.calls += 1
    return pair_norm(out, call.post)


register(Backend("simulated", simulated, logits="quantized", priority=10))
