"""λ, the factor of the noise map, and the per-pair norm: an RMSNorm of each pair's output, times a factor."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Attribute names of a layer's λ vectors.
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def lam_from_vectors(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *, init: float) -> Tensor:
    """Compute λ of a V1 layer: exp(λq1·λk1) - exp(λq2·λk2) + λ_init, a float32 scalar.

    Args:
        q1, k1, q2, k2: learned vectors [d].
        init: λ_init of the layer.

    Source: arXiv 2410.05258, equation 2.
    """
    return (q1.float() @ k1.float()).exp() - (q2.float() @ k2.float()).exp() + init


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
