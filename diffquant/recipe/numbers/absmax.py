"""Symmetric absmax quantization: the largest magnitude becomes the largest code, zero stays zero."""

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError, UsageError

# Number of entries to sum at once, since torch copies them into the dtype of the sum.
_SUMMED = 1 << 20

Axes = int | tuple[int, ...]


def max_code(bits: int) -> int:
    """Return the largest code of a symmetric `bits`-bit integer; the smallest is its negative."""
    if not 2 <= bits <= 8:
        raise UsageError(f"bits must be 2 to 8, got {bits}; 16 means not quantized and has no codes")
    return (1 << (bits - 1)) - 1


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for 16-bit tensors, otherwise the tensor's dtype."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def to_storable_scale(scale: Tensor, top: float, dtype: torch.dtype) -> Tensor:
    """Round scales to `dtype`, replace zeros by 1, and limit them so that scale · `top` does not overflow.

    Args:
        scale: scales of at least 0.
        top: largest level that scales are multiplied by.
        dtype: dtype of the result.
    """
    numbers = torch.finfo(dtype)
    rounded = scale.to(dtype)
    # A scale that was rounded down clips the largest magnitude: by many steps if the scale is subnormal.
    clips = (rounded < scale) & (rounded < numbers.smallest_normal)
    rounded = torch.where(clips, rounded + numbers.smallest_normal * numbers.eps, rounded)
    # One eps less, because the rounded quotient times `top` may exceed the largest number.
    limit = numbers.max / top * (1 - numbers.eps)
    return torch.where(rounded == 0, 1.0, rounded.clamp(max=limit))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes * scale in the scale's dtype, as every reader of the checkpoint computes it."""
    return codes.to(scale.dtype) * scale


def is_finite(x: Tensor) -> bool:
    """Return whether all values of x are finite. Sums are checked first, so a temporary of x's size is rarely made."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = all(bool(torch.isfinite(part.sum(dtype=wide))) for part in x.reshape(-1).split(_SUMMED))
    return sums or bool(torch.isfinite(x).all())


def check_finite(x: Tensor, name: str) -> None:
    """Raise NonFiniteError with the tensor's name and the first offending index if x is not finite."""
    # torch cannot sum or compare 8-bit floats.
    x = x.float() if x.itemsize == 1 else x
    if is_finite(x):
        return
    offenders = (~torch.isfinite(x)).nonzero()
    at = offenders[0].tolist()
    raise NonFiniteError(
        f"{name} {list(x.shape)} holds {len(offenders)} NaN or infinite values, the first ({x[tuple(at)].item()}) "
        f"at {at}: the checkpoint is damaged; fetch it again, or repair it"
    )
