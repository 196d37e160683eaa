"""The per-pair norm: an RMSNorm of each pair's output, times a factor."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairNorm:
    """Parameters of an RMSNorm over a pair's dv output channels, followed by a factor.

    Attributes:
        eps: epsilon of the norm.
        weight: weight of the norm [dv], or None.
        factor: factor of the normalized output, 1 - λ_init.
    """

    eps: float
    weight: Tensor | None = None
    factor: float = 1.0


def pair_norm(y: Tensor, post: PairNorm | None) -> Tensor:
    """Normalize each pair's output [B, h, T, dv] in float32 and apply the factor; return `y` if `post` is None.

    Source: arXiv 2410.05258, equation 2; transformers' DiffLlama and microsoft/unilm's subln.
    """
    if post is None:
        return y
    wide = y.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + post.eps)).to(y.dtype)
    if post.weight is not None:
        normed = post.weight * normed
    return (normed * post.factor).to(y.dtype)
