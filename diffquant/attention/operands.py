"""Simulated low-bit operands: absmax-quantize queries and keys before an exact Q·Kᵀ.

Low-bit attention kernels, such as SageAttention's (arXiv 2410.02367) and FlashAttention-3's (arXiv 2407.08608), round
Q and K, while the paper's experiment rounds their product. Scales cover only valid tokens and never two sequences.
Blocks of tokens are counted from the first token of a call, so left padding shifts them.
"""

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.numbers.absmax import Axes, compute_dtype
from diffquant.numbers.formats import NumberFormat
from diffquant.scheme import Scheme


def rounded_operands(q: Tensor, k: Tensor, mask: Mask, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize queries and keys; padding becomes zeros.

    Args:
        q: [B, query heads, T, d], all maps' heads.
        k: [B, key heads, S, d], likewise; keys that the maps share are rounded once.
        mask: mask with the valid tokens.
        scheme: scheme of both; "tensor" is one sequence's Q, or K, over all heads, "block" `size` tokens of a head,
            "group" `size` channels of a token.
            `smooth` subtracts the keys' mean over a sequence's tokens, which does not change softmax.

    Returns:
        Both in float32, or in float64 if the inputs are.
    """
    valid_queries, valid_keys = (
        None if valid is None else valid[:, None, :, None]
        for valid in (mask.valid_queries(q.shape[2]), mask.valid_keys)
    )
    queries, keys = _without_padding(q, valid_queries), _without_padding(k, valid_keys)
    if scheme.smooth:
        keys = _without_padding(keys - _mean_token(keys, valid_keys), valid_keys)
    return _read_back(queries, scheme), _read_back(keys, scheme)


def _without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if valid is None else wide.masked_fill(~valid, 0.0)


def _mean_token(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean [B, H, 1, d] over the valid tokens of x, which is 0 at the others."""
    if valid is None:
        return x.mean(2, keepdim=True)
    return x.sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)


def _read_back(x: Tensor, scheme: Scheme) -> Tensor:
    if not x.numel():
        return x
    size, length, width = scheme.sharing.tile, x.shape[2], x.shape[3]
    if scheme.granularity == "group":
        groups = torch.nn.functional.pad(x, (0, -width % (scheme.size or 1))).unflatten(3, (-1, scheme.size))
        return _rounded(groups, scheme.format, 4).flatten(3, 4)[..., :width]
    if not size:
        return _rounded(x, scheme.format, (*scheme.sharing.leading, 3))
    blocks = torch.nn.functional.pad(x, (0, 0, 0, -length % size)).unflatten(2, (-1, size))
    return _rounded(blocks, scheme.format, (3, 4)).flatten(2, 3)[:, :, :length]


def _rounded(x: Tensor, number_format: NumberFormat, dim: Axes) -> Tensor:
    scale = number_format.scale(x, dim)
    return number_format.decode(number_format.codes(x, scale), scale)
