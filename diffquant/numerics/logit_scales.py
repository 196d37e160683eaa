"""The scale of simulated low-bit logits, for a largest magnitude."""

import torch
from torch import Tensor

from diffquant.numerics.absmax import max_code
from diffquant.scheme import Scheme

# exp(-12) is 6e-6: what lies further below the row maximum weighs nothing, and finer steps above pay.
SHIFT_RANGE = 12.0


def step_of(magnitude: Tensor, scheme: Scheme) -> Tensor:
    """Scale for a largest magnitude; 1 where it is 0."""
    if scheme.shift:
        step = magnitude.clamp(max=SHIFT_RANGE) / (2**scheme.bits - 1)
    else:
        step = magnitude / max_code(scheme.bits)
    return torch.where(step == 0, 1.0, step)
