"""Symmetric absmax quantization: the largest magnitude becomes the largest code, zero stays zero."""

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError, UsageError

Axes = int | tuple[int, ...]


def max_code(bits: int) -> int:
    """Largest code of a symmetric `bits`-bit integer; the smallest is its negative."""
    if not 2 <= bits <= 8:
        raise UsageError(f"bits must be 2 to 8, got {bits}; 16 means not quantized and has no codes")
    return (1 << (bits - 1)) - 1


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype to compute in: float32 for half types, the tensor's own otherwise."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def absmax_scale(x: Tensor, bits: int, dim: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """Scale that maps the largest magnitude along `dim` to the largest code.

    Args:
        x: [...] finite floats.
        bits: 2 to 8; codes run from -(2^(bits-1) - 1) to 2^(bits-1) - 1.
        dim: axes that share one scale; kept with size 1.
        dtype: dtype that the scale will be stored in; float32 (float64 for float64) by default.

    Returns:
        `x`'s shape with `dim` reduced to 1. Where all of x is zero, or so small that the scale would
        be, it is 1.

    Source: dynamic absmax quantization, arXiv 2410.05258, section 3.7.
    """
    largest = x.abs().amax(dim, keepdim=True).to(compute_dtype(x))
    return storable_scale(largest / max_code(bits), bits, dtype or largest.dtype)


def storable_scale(scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """A scale rounded to `dtype`: 1 where it is zero, and no larger than what its codes can multiply."""
    numbers = torch.finfo(dtype)
    rounded = scale.to(dtype)
    # Rounding down makes the largest code clip: by a fraction of a step, but by many where few digits are left.
    clips = (rounded < scale) & (rounded < numbers.smallest_normal)
    rounded = torch.where(clips, rounded + numbers.smallest_normal * numbers.eps, rounded)
    # The quotient is rounded first: its product with the largest code may lie just beyond the largest number.
    limit = numbers.max / max_code(bits) * (1 - numbers.eps)
    return torch.where(rounded == 0, 1.0, rounded.clamp(max=limit))


def quantize(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes of x: round-half-even(x / scale), clamped.

    Args:
        x: [...] finite floats.
        scale: positive, broadcastable to x.
        bits: 2 to 8.

    Returns:
        int8, x's shape.
    """
    largest = max_code(bits)
    ratio = x.to(compute_dtype(x)) / scale
    return ratio.round_().clamp_(-largest, largest).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes * scale, in the scale's dtype: what a reader of the checkpoint computes."""
    return codes.to(scale.dtype) * scale


def sharing_view(x: Tensor, granularity: str, size: int | None = None) -> tuple[Tensor, Axes]:
    """View of x, and its axes along which all entries share one scale.

    Args:
        x: [..., rows, columns].
        granularity: "tensor" (all of x), "head" (one matrix), "row" (of the matrix), "group" (`size`
            neighbours along the columns), "column" (`size` neighbours along the rows, all rows without it).
        size: entries that share a scale, for "group" and "column".

    Raises:
        UsageError: the granularity is unknown, or `size` does not divide the axis.
    """
    if granularity == "tensor":
        return x, tuple(range(x.dim()))
    if granularity == "head":
        return x, (-2, -1)
    if granularity == "row":
        return x, -1
    if granularity == "group":
        return _split(x, -1, size), -1
    if granularity == "column":
        return (x, -2) if size is None else (_split(x, -2, size), -2)
    raise UsageError(f"granularity {granularity!r} does not name entries of one tensor")


def _split(x: Tensor, axis: int, size: int | None) -> Tensor:
    length = x.shape[axis]
    if not size or length % size:
        raise UsageError(f"{size} does not divide axis {axis} of a tensor of shape {list(x.shape)}")
    blocks: Tensor = x.unflatten(axis, (length // size, size))
    return blocks


def check_finite(x: Tensor, name: str) -> None:
    """Raise NonFiniteError, naming the tensor and its first offending index, unless all of x is finite."""
    if torch.isfinite(x.sum(dtype=torch.float64)):
        return
    offenders = (~torch.isfinite(x)).nonzero()
    if len(offenders):
        at = offenders[0].tolist()
        raise NonFiniteError(
            f"{name} {list(x.shape)} holds {len(offenders)} NaN or infinite values, the first ({x[tuple(at)].item()}) "
            f"at {at}; repair the checkpoint, absmax scales are not defined for it"
        )
