"""Simulated low-bit operands: absmax-quantize queries and keys before an exact Q·Kᵀ, and values before P·V.

Low-bit attention kernels, such as SageAttention's (arXiv 2410.02367) and FlashAttention-3's (arXiv 2407.08608), round
Q, K and V, while the paper's experiment rounds Q·Kᵀ. Scales cover only valid tokens and never two sequences. Blocks and
groups of tokens are counted from the first token of a call, so left padding shifts them, and a scale that spans tokens
is also of tokens that a query does not see, as in those kernels.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.family.mask import Mask
from diffquant.numbers.absmax import Axes, compute_dtype
from diffquant.numbers.formats import NumberFormat
from diffquant.numbers.rotation import rotated, rotation
from diffquant.scheme import Scheme

# Tokens whose queries share a mean, as SageAttention 2 and 3 have them: those of a tile.
_TILE = 128
# How a block of tokens is taken apart, and which of the axes (from the tokens on, channels last) share a scale: the
# fragments of Q and of K that a warp, or a thread of it, holds (arXiv 2411.10958, section 3.2).
_FRAGMENTS: dict[tuple[str, str], tuple[tuple[int, ...], Axes]] = {
    ("warp", "q"): ((32,), (3, 4)),
    ("warp", "k"): ((64,), (3, 4)),
    ("thread", "q"): ((4, 8), (3, 5)),
    ("thread", "k"): ((8, 4, 2), (3, 5, 6)),
}


def rounded_operands(q: Tensor, k: Tensor, mask: Mask, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize queries and keys; padding becomes zeros.

    Args:
        q: [B, query heads, T, d], all maps' heads.
        k: [B, key heads, S, d], likewise; keys that the maps share are rounded once.
        mask: mask with the valid tokens.
        scheme: scheme of both; "tensor" is one sequence's Q, or K, over all heads, "block" `size` tokens of a head,
            "group" `size` channels of a token. `rotated` turns the channels of both alike first (incoherent processing,
            arXiv 2407.08608, section 3.3). `smooth` subtracts the keys' mean over a sequence's tokens, which does not
            change softmax. `smoothq` subtracts the queries' mean over blocks of 128 tokens, and adds that mean's
            product with the unrounded keys by further channels (arXiv 2411.10958, section 3.1).

    Returns:
        Both in float32, or in float64 if the inputs are, [..., d], or [..., 2d] with `smoothq`.
    """
    valid_queries, valid_keys = _valid(mask.valid_queries(q.shape[2])), _valid(mask.valid_keys)
    queries, keys = _without_padding(q, valid_queries), _without_padding(k, valid_keys)
    if scheme.rotated:
        matrix = rotation(q.shape[3]).to(queries.dtype)
        queries, keys = rotated(queries, matrix), rotated(keys, matrix)
    if scheme.smooth:
        keys = _without_padding(keys - _mean_token(keys, valid_keys), valid_keys)
    if not scheme.smoothq:
        return _read_back(queries, scheme, "q"), _read_back(keys, scheme, "k")
    means = _tile_means(queries, valid_queries)
    queries = _without_padding(queries - means, valid_queries)
    return (
        torch.cat([_read_back(queries, scheme, "q"), means], -1),
        torch.cat([_read_back(keys, scheme, "k"), keys], -1),
    )


def rounded_values(v: Tensor, mask: Mask, scheme: Scheme) -> Tensor:
    """Quantize and dequantize values before softmax's weights multiply them; padding becomes zeros.

    Args:
        v: [B, KV heads, S, dv].
        mask: mask with the valid tokens.
        scheme: scheme; "column" is a channel over all tokens, "group" `size` tokens of a channel (those that P·V sums
            over), "row" a token of a head, and "head", "tensor" and "block" as in `rounded_operands`.

    Returns:
        In float32, or in float64 if the input is.
    """
    return _read_back(_without_padding(v, _valid(mask.valid_keys)), scheme, "v")


def _valid(tokens: Tensor | None) -> Tensor | None:
    """Valid tokens [B, S] as they broadcast to heads [B, H, S, d]."""
    return None if tokens is None else tokens[:, None, :, None]


def _without_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if valid is None else wide.masked_fill(~valid, 0.0)


def _mean_token(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean [B, H, 1, d] over the valid tokens of x, which is 0 at the others."""
    if valid is None:
        return x.mean(2, keepdim=True)
    return x.sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)


def _tile_means(x: Tensor, valid: Tensor | None) -> Tensor:
    """Means of x [B, H, T, d] over the valid tokens of each tile, repeated for its tokens."""
    length = x.shape[2]
    counted = x.new_ones(1, 1, length, 1) if valid is None else valid.to(x.dtype)
    sums, counts = (pad(y, (0, 0, 0, -length % _TILE)).unflatten(2, (-1, _TILE)).sum(3) for y in (x, counted))
    means: Tensor = (sums / counts.clamp(min=1)).repeat_interleave(_TILE, 2)
    return means[:, :, :length]


def _read_back(x: Tensor, scheme: Scheme, operand: str) -> Tensor:
    """Operand [B, H, T, d], "q", "k" or "v", as a scheme's codes and scales give it back."""
    if not x.numel():
        return x
    sharing, number_format = scheme.sharing, scheme.format
    size = sharing.size or 1
    if sharing.name == "group" and operand != "v":
        width = x.shape[3]
        groups = pad(x, (0, -width % size)).unflatten(3, (-1, size))
        return _rounded(groups, number_format, 4).flatten(3, 4)[..., :width]
    if sharing.name == "column":
        return _rounded(x, number_format, 2)
    if sharing.name in ("warp", "thread"):
        parts, dim = _FRAGMENTS[sharing.name, operand]
    elif sharing.name in ("group", "block"):
        parts, dim = (size,), 3 if sharing.name == "group" else (3, 4)
    else:
        return _rounded(x, number_format, (*sharing.leading, 3))
    length, tokens = x.shape[2], torch.Size(parts).numel()
    blocks = pad(x, (0, 0, 0, -length % tokens)).unflatten(2, (-1, *parts))
    return _rounded(blocks, number_format, dim).flatten(2, -2)[:, :, :length]


def _rounded(x: Tensor, number_format: NumberFormat, dim: Axes) -> Tensor:
    scale = number_format.scale(x, dim)
    return number_format.decode(number_format.codes(x, scale), scale)
