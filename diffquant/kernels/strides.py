"""Tensors as kernels address them: a contiguous last axis, and one set of strides for both maps."""

from torch import Tensor


def same_strides(*maps: Tensor) -> list[Tensor]:
    """The tensors with a contiguous last axis and equal strides; copied only where they lack either."""
    first = maps[0].stride()
    if first[-1] == 1 and all(x.stride() == first for x in maps):
        return list(maps)
    return [x.contiguous() for x in maps]
