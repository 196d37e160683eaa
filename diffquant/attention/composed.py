"""Differential attention composed of ready-made attention calls.

The paper's appendix A gives two compositions: FlashDiffAttn_1 takes two calls and a kernel whose
values may be wider than its keys; FlashDiffAttn_2 takes four calls, one for each map and half of V.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diffquant.family.mask import Mask

# (q [B, H, T, d], k [B, H_kv, S, d], v [B, H_kv, S, dv]) -> [B, H, T, dv]
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def flashdiff1(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, scale: float, mask: Mask
) -> Tensor:
    """One SDPA call a map; where the maps share K (V2), one call for both. Arguments as `naive`."""
    return _combine(q, k, v, lam, sdpa_call(q[0], v, scale, mask))


def flashdiff2(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, scale: float, mask: Mask
) -> Tensor:
    """As `flashdiff1`, each half of a V twice as wide as K in a call of its own. Arguments as `naive`."""
    call = sdpa_call(q[0], v, scale, mask)
    return torch.cat([_combine(q, k, part, lam, call) for part in _key_wide(v, q[0].shape[-1])], -1)


def flash_attn(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, scale: float, mask: Mask
) -> Tensor:
    """As `flashdiff2` on the `flash-attn` package (CUDA, half types, no padding). Arguments as `naive`."""
    from flash_attn import flash_attn_func

    def call(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # flash-attn wants [B, length, heads, width]; its causal mask is right-aligned, as ours.
        turned = (x.transpose(1, 2) for x in (queries, keys, values))
        return flash_attn_func(*turned, softmax_scale=scale, causal=mask.causal).transpose(1, 2)

    return torch.cat([_combine(q, k, part, lam, call) for part in _key_wide(v, q[0].shape[-1])], -1)


def sdpa_call(q: Tensor, v: Tensor, scale: float, mask: Mask) -> Call:
    """torch's scaled_dot_product_attention under a mask; a query that sees nothing gives 0."""
    length, keys = q.shape[2], v.shape[2]
    plainly_causal = mask.causal and mask.keys is None and mask.window is None and length == keys
    visible = None if plainly_causal else mask.dense(length, keys, q.device)
    may_be_blind = mask.keys is not None or length > keys
    blind = ~visible.any(-1, keepdim=True) if may_be_blind and visible is not None else None

    def call(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=visible,
            is_causal=plainly_causal and length > 1,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return out if blind is None else out.masked_fill(blind, 0.0)

    return call


def _combine(q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, call: Call) -> Tensor:
    if lam is None:
        return call(q[0], k[0], v)
    if k[0] is k[1]:
        # A pair's two queries are neighbours in one group, so both maps are a single grouped call.
        both = call(torch.stack(tuple(q), 2).flatten(1, 2), k[0], v)
        signal, noise = both[:, 0::2], both[:, 1::2]
    else:
        signal, noise = (call(queries, keys, v) for queries, keys in zip(q, k, strict=True))
    return torch.addcmul(signal, lam.to(signal.dtype), noise, value=-1)


def _key_wide(v: Tensor, width: int) -> tuple[Tensor, ...]:
    return v.split(width, -1)
