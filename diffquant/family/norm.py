"""The RMSNorm and the factor that follow a pair's attention."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairNorm:
    """RMSNorm over a pair's dv output channels, followed by a factor.

    Attributes:
        eps: epsilon of the norm.
        weight: weight of the norm [dv], if it has one.
        factor: factor of the normalized output, 1 - λ_init.
    """

    eps: float
    weight: Tensor | None = None
    factor: float = 1.0


def pair_norm(y: Tensor, post: PairNorm | None) -> Tensor:
    """RMSNorm over a pair's output [B, h, T, dv] in float32, times the factor; `y` itself without `post`.

    Source: arXiv 2410.05258, equation 2; transformers' DiffLlama and microsoft/unilm's subln.
    """
    if post is None:
        return y
    wide = y.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + post.eps)).to(y.dtype)
    if post.weight is not None:
        normed = post.weight * normed
    return (normed * post.factor).to(y.dtype)
