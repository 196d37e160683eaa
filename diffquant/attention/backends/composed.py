"""Differential attention composed of ready-made attention calls.

The paper's appendix A gives two compositions: FlashDiffAttn_1 makes two calls and needs a kernel whose values may be
wider than its keys; FlashDiffAttn_2 makes four calls, one for each map and half of V.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.heads import each_pairs_noise
from diffquant.family.norm import pair_norm

# The widest heads that the flash-attn package has kernels for.
_WIDEST = 256
# From q [B, H, T, d], k [B, H_kv, S, d] and v [B, H_kv, S, dv] to [B, H, T, dv].
MapAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flashdiff1(call: AttentionCall) -> Tensor:
    """Attention of a call with one SDPA call per map, or a single one if the maps share K (V2)."""
    return pair_norm(_combine(call, call.v, sdpa(call)), call.post)


def flashdiff2(call: AttentionCall) -> Tensor:
    """Like `flashdiff1`, but with one SDPA call for each half of V if V is twice as wide as K."""
    return _by_parts(call, sdpa(call))


def flash_attn(call: AttentionCall) -> Tensor:
    """Like `flashdiff2`, with the `flash-attn` package (CUDA, half types, no padding)."""
    from flash_attn import flash_attn_func

    def one_map(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # flash-attn wants [B, length, heads, width]; its causal mask is right-aligned like ours.
        by_token = (x.transpose(1, 2) for x in (queries, keys, values))
        out: Tensor = flash_attn_func(*by_token, softmax_scale=call.scale, causal=True)
        return out.transpose(1, 2)

    return _by_parts(call, one_map)


def sdpa(call: AttentionCall) -> MapAttention:
    """Attention of one map by torch's SDPA under a call's mask; 0 for a query that sees nothing."""
    length, keys = call.length, call.keys
    is_plain = call.mask.keys is None and call.mask.seen is None
    plainly_causal = is_plain and length == keys and not call.mask.hides_by_window(keys)
    visible = None if plainly_causal else call.mask.dense(length, keys, call.v.device)
    may_be_blind = not is_plain or length > keys
    blind = ~visible.any(-1, keepdim=True) if may_be_blind and visible is not None else None

    def one_map(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=visible,
            is_causal=plainly_causal and length > 1,
            scale=call.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return out if blind is None else out.masked_fill(blind, 0.0)

    return one_map


def _by_parts(call: AttentionCall, one_map: MapAttention) -> Tensor:
    """Attention of a call computed on parts of V as wide as K, followed by the pair norm."""
    parts = call.v.split(call.q[0].shape[-1], -1)
    return pair_norm(torch.cat([_combine(call, part, one_map) for part in parts], -1), call.post)


def _combine(call: AttentionCall, v: Tensor, one_map: MapAttention) -> Tensor:
    """The signal map's result minus λ times the noise map's."""
    q, k = call.q, call.k
    if call.lam is None:
        return one_map(q[0], k[0], v)
    if call.shares_keys and call.signals_per_noise == 1:
        # A pair's two queries share a group, so a single grouped call computes both maps.
        both = one_map(torch.stack(tuple(q), 2).flatten(1, 2), k[0], v)
        signal, noise = both[:, 0::2], both[:, 1::2]
    else:
        signal, noise = (one_map(queries, keys, v) for queries, keys in zip(q, k, strict=True))
    if call.signal_gate is not None:
        signal = call.signal_gate.to(signal.dtype) * signal
    return torch.addcmul(signal, call.lam.to(signal.dtype), each_pairs_noise(noise, call.pairs), value=-1)


@cache
def _has_flash_attn() -> bool:
    """Whether the flash-attn package is installed; looked up once, since every layer of every step asks."""
    return find_spec("flash_attn") is not None


def _flash_attn_refuses(call: AttentionCall) -> str | None:
    if not call.v.is_cuda:
        return "flash-attn runs on CUDA only"
    if call.v.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {call.v.dtype}"
    if call.mask.keys is not None or call.mask.seen is not None:
        return "flash-attn is called without padding masks here"
    if call.mask.hides_by_window(call.keys):
        return "flash-attn is called without windows here"
    width, value_width = call.q[0].shape[-1], call.v.shape[-1]
    if width > _WIDEST or value_width % width:
        return (
            f"flash-attn takes heads up to {_WIDEST} wide and values as wide, called for each part of wider ones; "
            f"here keys are {width} and values {value_width} wide"
        )
    return None if _has_flash_attn() else "the flash-attn package is not installed: pip install flash-attn"


register(Backend("flashdiff1", flashdiff1))
# SDPA's flash kernels want values as wide as keys and fall back to full maps for wider ones, so V's
# halves go in calls of their own; with values as wide as keys there is one half and nothing lost.
register(Backend("flashdiff2", flashdiff2, priority=10))
register(Backend("flash_attn", flash_attn, _flash_attn_refuses, priority=20))
