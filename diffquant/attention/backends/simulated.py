"""Simulated low-bit logits and softmax weights in PyTorch by blocks of queries.

Memory is linear in S, while `naive` needs T x S.
"""

import warnings

from torch import Tensor

from diffquant.attention.backends.blocks import by_blocks
from diffquant.attention.registry import BACKENDS, Backend, register
from diffquant.family.call import AttentionCall


def simulated(call: AttentionCall) -> Tensor:
    """Attention of a call with rounded maps, followed by the pair norm, in memory linear in S."""
    if call.v.is_cuda and (refusal := BACKENDS["triton-simulated"].refuses(call)):
        warnings.warn(f"maps are quantized in PyTorch, many times slower than in a kernel: {refusal}", stacklevel=2)
    out = by_blocks(call)
    call.count()
    return out


register(Backend("simulated", simulated, logits="quantized", priority=10))
