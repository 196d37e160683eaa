"""Queries and keys of one length, so that logits have the same largest magnitude in every kind of model."""

import math

from torch import Tensor, nn

from diffquant.model.modeling import DiffTransformer


class NormedLinear(nn.Linear):
    """A projection to heads, each scaled to one root mean square; it has no bias.

    Attributes:
        head: width of a head.
        gain: root mean square of a head's channels.
    """

    head: int
    gain: float

    def forward(self, x: Tensor) -> Tensor:
        return normed(super().forward(x), self.head, self.gain)


def normed(x: Tensor, head: int, gain: float) -> Tensor:
    """Heads of `head` channels each, scaled to the root mean square `gain`; computed in float32."""
    heads = x.float().unflatten(-1, (-1, head))
    scaled = heads * (gain * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    return scaled.flatten(-2).to(x.dtype)


def equalize(model: DiffTransformer, largest: float) -> None:
    """Let no logit of a model exceed a magnitude, and every head reach it where query and key agree.

    Rotary embedding keeps lengths, so with root mean square g a logit is at most g²·d/√d.
    """
    for attention in model.attention_modules:
        gain = math.sqrt(largest / math.sqrt(attention.spec.head_dim))
        for projection in (attention.q_proj, attention.k_proj):
            projection.__class__ = NormedLinear
            projection.head, projection.gain = attention.spec.head_dim, gain
