"""The plain form as a backend: any device, any logits, full maps in memory."""

from torch import Tensor

from diffquant.attention.naive import naive
from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.norm import pair_norm


def naive_with_norm(call: AttentionCall) -> Tensor:
    """Attention of a call in its plain form, and the pair norm behind it."""
    rounding = (call.logits, call.ranges, call.meter)
    y = naive(call.q, call.k, call.v, call.lam, call.scale, call.mask, *rounding, call.signal_gate)
    return pair_norm(y, call.post)


register(Backend("naive", naive_with_norm, logits="both"))
