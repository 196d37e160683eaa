"""What follows a pair's attention."""

import torch
from torch import Tensor

from diffquant.kernels.arguments import PairNorm


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
    return normed * post.factor
