"""The angles of rotary embedding: plain, and stretched by YaRN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffquant.numbers.absmax import compute_dtype


def plain_frequencies(width: int, theta: float) -> list[float]:
    """Angle per position of each of the width/2 pairs of channels: θ^(-2j/width)."""
    return [theta ** (-2 * j / width) for j in range(width // 2)]


def yarn_frequencies(width: int, theta: float, settings: Mapping[str, Any]) -> list[float]:
    """Angles per position, those of slow channels divided by a factor.

    Args:
        settings: "factor"; "original_max_position_embeddings", the positions that the model was trained on before it
            was stretched; "beta_fast" and "beta_slow", the turns over these positions between which angles go from
            plain to divided.

    Source: YaRN, arXiv 2309.00071, section 3.2.
    """
    factor, original = settings["factor"], settings["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(channel(settings.get("beta_fast") or 32)), 0)
    high = min(math.ceil(channel(settings.get("beta_slow") or 1)), width - 1)
    divided = [min(max((j - low) / max(high - low, 0.001), 0.0), 1.0) for j in range(width // 2)]
    plain = plain_frequencies(width, theta)
    return [f * (1 - share) + f / factor * share for f, share in zip(plain, divided, strict=True)]


def yarn_factor(factor: float, mscale: float) -> float:
    """Factor of queries, and of keys, where positions are stretched by a factor: 0.1·mscale·ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1


def rotary_tables(positions: Tensor, frequencies: Sequence[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B or 1, T, width] of positions [B or 1, T], in another tensor's dtype."""
    wide = compute_dtype(like)
    angles = positions[..., None].to(wide) * torch.tensor(frequencies, dtype=wide, device=positions.device)
    both = torch.cat([angles, angles], -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)
