"""The plain form as a backend: any device, any logits, full maps in memory."""

from torch import Tensor

from diffquant.attention.naive import naive
from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.norm import pair_norm


def compute(call: AttentionCall) -> Tensor:
    """`naive` of a call, and its norm."""
    y = naive(call.q, call.k, call.v, call.lam, call.scale, call.mask, call.logits, call.ranges, call.meter)
    return pair_norm(y, call.post)


register(Backend("naive", compute, logits="both"))
