"""Rotations of a head's channels that spread what is large in a few of them over all, before they are rounded."""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def rotation(width: int) -> Tensor:
    """An orthogonal matrix, the same one for a width wherever it is made.

    Random signs and then a Hadamard matrix where the width is a power of two; else the orthogonal factor of a matrix of
    random normal numbers.

    Returns:
        [width, width] float64.

    Source: the randomized Hadamard transform of Ashkboos et al., QuaRot, arXiv 2404.00456, section 3.
    """
    generator = torch.Generator().manual_seed(width)
    if width & (width - 1):
        normal = torch.randn(width, width, dtype=torch.float64, generator=generator)
        orthogonal: Tensor = torch.linalg.qr(normal).Q
        return orthogonal
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (width, 1), generator=generator) * 2 - 1
    matrix: Tensor = signs * hadamard * width**-0.5
    return matrix


def rotated(x: Tensor, matrix: Tensor) -> Tensor:
    """Heads [..., d] times a matrix [d, d], computed in its dtype and given back in theirs."""
    return (x.to(matrix.dtype) @ matrix.to(x.device)).to(x.dtype)
