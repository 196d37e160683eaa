"""The positions of tokens."""

import torch
from torch import Tensor


def count_positions(valid: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Positions [B or 1, T] of new tokens, counted over what is not padding.

    Args:
        valid: validity [B, S] of cached and new tokens; None if there is no padding.
        past: number of cached tokens.
        length: T, number of new ones.
    """
    if valid is None:
        return torch.arange(past, past + length, device=device)[None]
    return (valid.long().cumsum(1) - 1).clamp_(min=0)[:, past:]
