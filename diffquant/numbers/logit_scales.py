"""Scales of simulated low-bit logits."""

import torch
from torch import Tensor

from diffquant.numbers.absmax import max_code
from diffquant.scheme import Scheme

# exp(-12) is 6e-6: what lies further below the row maximum weighs nothing, and a finer scale above pays.
SHIFT_RANGE = 12.0


def logit_scale(magnitude: Tensor, scheme: Scheme) -> Tensor:
    """Scale that maps a largest magnitude to the scheme's largest code; 1 where it is 0.

    Args:
        magnitude: largest |logit| of the entries that share a scale, any shape.
        scheme: scheme of the logits; with `shift` all are at most 0, and every code stands for one.
    """
    if scheme.shift:
        scale = magnitude.clamp(max=SHIFT_RANGE) / (2**scheme.bits - 1)
    else:
        scale = magnitude / max_code(scheme.bits)
    return torch.where(scale == 0, 1.0, scale)
