"""Simulates low-bit operands: absmax-quantizes queries and keys before an exact Q·Kᵀ, and values before P·V.

Low-bit attention kernels, such as SageAttention's (arXiv 2410.02367) and FlashAttention-3's (arXiv 2407.08608),
quantize Q, K and V, while the paper's experiment quantizes Q·Kᵀ. A scale depends only on valid tokens of one sequence.
Blocks and groups of tokens are counted from the first token of a call, so left padding shifts them. As in those
kernels, a scale shared by several tokens also depends on tokens that a query does not see.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.family.mask import Mask
from diffquant.recipe.numbers.absmax import Axes, computing_dtype
from diffquant.recipe.numbers.formats import NumberFormat
from diffquant.recipe.numbers.simulation import make_rotation_matrix, rotate_by
from diffquant.recipe.scheme import Scheme

# Number of tokens whose queries share a mean, one tile, as in SageAttention 2 and 3.
_TILE = 128
# The shape into which a block of tokens is split, and which of the resulting axes (channels last) share a scale: the
# parts of Q and of K that one warp or one thread holds (arXiv 2411.10958, section 3.2).
_FRAGMENTS: dict[tuple[str, str], tuple[tuple[int, ...], Axes]] = {
    ("warp", "q"): ((32,), (3, 4)),
    ("warp", "k"): ((64,), (3, 4)),
    ("thread", "q"): ((4, 8), (3, 5)),
    ("thread", "k"): ((8, 4, 2), (3, 5, 6)),
}


def round_operands(q: Tensor, k: Tensor, mask: Mask, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize queries and keys; padding becomes 0.

    Args:
        q: [B, query heads, T, d], all maps' heads.
        k: [B, key heads, S, d], all maps' heads; keys that both maps share occur once.
        mask: mask that gives the valid tokens.
        scheme: scheme of Q and of K. A scale is shared by one sequence's heads and tokens ("tensor"), by `size` tokens
            of a head ("block") or by `size` channels of a token ("group"). `rotated` first multiplies the channels of
            both by the same rotation (incoherent processing, arXiv 2407.08608, section 3.3). `smooth` subtracts the
            keys' mean over a sequence's tokens, which does not change softmax. `smoothq` subtracts the queries' mean
            over blocks of 128 tokens; additional channels add the product of that mean and the unrounded keys back to
            the logits (arXiv 2411.10958, section 3.1).

    Returns:
        Both in float32, or in float64 if the inputs are; [..., d], or [..., 2d] with `smoothq`.
    """
    valid_queries, valid_keys = _broadcast_tokens(mask.valid_queries(q.shape[2])), _broadcast_tokens(mask.valid_keys)
    queries, keys = _zero_padding(q, valid_queries), _zero_padding(k, valid_keys)
    if scheme.has_transform("rotated"):
        matrix = make_rotation_matrix(q.shape[3]).to(queries.dtype)
        queries, keys = rotate_by(queries, matrix), rotate_by(keys, matrix)
    if scheme.has_transform("smooth"):
        keys = _zero_padding(keys - _mean_token(keys, valid_keys), valid_keys)
    if not scheme.has_transform("smoothq"):
        return _simulate(queries, scheme, "q"), _simulate(keys, scheme, "k")
    means = _tile_means(queries, valid_queries)
    queries = _zero_padding(queries - means, valid_queries)
    return (
        torch.cat([_simulate(queries, scheme, "q"), means], -1),
        torch.cat([_simulate(keys, scheme, "k"), keys], -1),
    )


def round_values(v: Tensor, mask: Mask, scheme: Scheme) -> Tensor:
    """Quantize and dequantize values before they are multiplied by softmax weights; padding becomes 0.

    Args:
        v: [B, KV heads, S, dv].
        mask: mask that gives the valid tokens.
        scheme: scheme. A scale is shared by all tokens of a channel ("column"), by `size` tokens of a channel ("group",
            along the axis that P·V sums over), by a token of a head ("row"), or as in `round_operands` ("head",
            "tensor" and "block").

    Returns:
        The values in float32, or in float64 if the input is.
    """
    return _simulate(_zero_padding(v, _broadcast_tokens(mask.valid_keys)), scheme, "v")


def _broadcast_tokens(tokens: Tensor | None) -> Tensor | None:
    """Reshape a mask of valid tokens [B, S] to broadcast to heads [B, H, S, d]."""
    return None if tokens is None else tokens[:, None, :, None]


def _zero_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    wide = x.to(computing_dtype(x))
    return wide if valid is None else wide.masked_fill(~valid, 0.0)


def _mean_token(x: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the mean [B, H, 1, d] of x over its valid tokens; x must be 0 at padding."""
    if valid is None:
        return x.mean(2, keepdim=True)
    return x.sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)


def _tile_means(x: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the mean of x [B, H, T, d] over the valid tokens of each tile, repeated for the tile's tokens."""
    length = x.shape[2]
    counted = x.new_ones(1, 1, length, 1) if valid is None else valid.to(x.dtype)
    sums, counts = (pad(y, (0, 0, 0, -length % _TILE)).unflatten(2, (-1, _TILE)).sum(3) for y in (x, counted))
    means: Tensor = (sums / counts.clamp(min=1)).repeat_interleave(_TILE, 2)
    return means[:, :, :length]


def _simulate(x: Tensor, scheme: Scheme, operand: str) -> Tensor:
    """Quantize and dequantize an operand [B, H, T, d], "q", "k" or "v", under a scheme."""
    if not x.numel():
        return x
    sharing, number_format = scheme.sharing, scheme.format
    size = sharing.size or 1
    if sharing.name == "group" and operand != "v":
        width = x.shape[3]
        groups = pad(x, (0, -width % size)).unflatten(3, (-1, size))
        return _round(groups, number_format, 4).flatten(3, 4)[..., :width]
    if sharing.name == "column":
        return _round(x, number_format, 2)
    if sharing.name in ("warp", "thread"):
        parts, dim = _FRAGMENTS[sharing.name, operand]
    elif sharing.name in ("group", "block"):
        parts, dim = (size,), 3 if sharing.name == "group" else (3, 4)
    else:
        return _round(x, number_format, (*sharing.shared_leading_axes, 3))
    length, tokens = x.shape[2], torch.Size(parts).numel()
    blocks = pad(x, (0, 0, 0, -length % tokens)).unflatten(2, (-1, *parts))
    return _round(blocks, number_format, dim).flatten(2, -2)[:, :, :length]


def _round(x: Tensor, number_format: NumberFormat, dim: Axes) -> Tensor:
    return number_format.simulate(x, number_format.compute_scale(x, dim))
