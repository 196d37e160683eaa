"""Numbers in registers: every register is a row of words, one a thread, that instructions read as their type.

Rows are never changed in place, so that registers may share one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.ptx.parsing import SIZES

Array = NDArray[Any]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TYPES: dict[str, Any] = {
    **{f"u{8 * size}": kind for size, kind in BITS.items()},
    **{f"b{8 * size}": kind for size, kind in BITS.items()},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64},
    **{"f16x2": np.float16, "s16x2": np.int16, "u16x2": np.uint16},
}
FLOATS = ("f16", "bf16", "f32", "f64")
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def from_words(words: Array, kind: str) -> Array:
    """Numbers of a type from registers. bfloat16 becomes float32; of packed types both numbers, the low one first."""
    size = SIZES[kind]
    bits = words if words.dtype.itemsize == size else words.astype(BITS[size])
    if kind in ("bf16", "bf16x2"):
        return bfloat16_to_float32(bits.view(np.uint16))
    return bits.view(_TYPES.get(kind, BITS[size]))


def to_words(numbers: Array, kind: str) -> Array:
    """Registers that hold numbers of a type, in its width."""
    if kind in ("bf16", "bf16x2"):
        numbers = float32_to_bfloat16(numbers.astype(np.float32, copy=False))
    else:
        numbers = numbers.astype(_TYPES.get(kind, numbers.dtype), copy=False)
    return numbers.view(BITS[SIZES[kind]])


def bfloat16_to_float32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(numbers: Array) -> Array:
    """Bits of the nearest bfloat16, halves to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)


def float32_to_e4m3(numbers: Array) -> Array:
    """Bits of the nearest e4m3, halves to even; what lies beyond its range is its largest (`satfinite`)."""
    limited = np.clip(numbers.astype(np.float32), -448, 448)
    return torch.from_numpy(limited).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def e4m3_to_float32(bits: Array) -> Array:
    taken: Array = _E4M3[bits]
    return taken


def joined(low: Array, high: Array, kind: str) -> Array:
    """A packed register of two numbers."""
    return to_words(np.stack([low, high], 1).reshape(-1), kind)


def flushed(numbers: Array) -> Array:
    """float32 with subnormal numbers as zeros of their sign (`ftz`)."""
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.copysign(np.float32(0), numbers), numbers)


def as_integers(numbers: Array, rounded: Callable[[Array], Array], kind: str) -> Array:
    """Floats as integers of a type, its ends for what lies beyond, 0 for NaN."""
    limits = np.iinfo(_TYPES[kind])
    whole = rounded(numbers.astype(np.float64))
    inside = np.clip(np.where(np.isnan(whole), 0, whole), float(limits.min), float(limits.max))
    return inside.astype(_TYPES[kind])


def number_type(kind: str) -> Any:
    """NumPy's type of a number."""
    return _TYPES[kind]
