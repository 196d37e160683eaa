"""Numbers in registers: every register is a row of 64-bit words, one a thread, that instructions read as their type."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.ptx.memory import Words
from tests.support.ptx.parsing import SIZES, Fault

Array = NDArray[Any]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TYPES: dict[str, Any] = {
    **{f"u{8 * size}": kind for size, kind in BITS.items()},
    **{f"b{8 * size}": kind for size, kind in BITS.items()},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64},
}
FLOATS = ("f16", "bf16", "f32", "f64")
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def from_words(words: Array, kind: str) -> Array:
    """Numbers of a type from registers; bfloat16 becomes float32, and packed types their bits."""
    bits = words.astype(BITS[SIZES[kind]])
    if kind == "bf16":
        return bfloat16_to_float32(bits)
    return bits.view(_TYPES[kind]) if kind in _TYPES else bits


def to_words(numbers: Array, kind: str) -> Words:
    """Registers that hold numbers of a type."""
    if kind == "bf16":
        numbers = float32_to_bfloat16(numbers.astype(np.float32))
    elif kind in _TYPES and numbers.dtype != _TYPES[kind]:
        numbers = numbers.astype(_TYPES[kind])
    return numbers.view(BITS[numbers.dtype.itemsize]).astype(np.uint64)


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


def halves(words: Array, kind: str) -> tuple[Array, Array]:
    """Both numbers of a packed register ("f16x2", "bf16x2", "s16x2"), the low one first."""
    bits = words.astype(np.uint32)
    low, high = (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)
    if kind == "f16x2":
        return low.view(np.float16).astype(np.float64), high.view(np.float16).astype(np.float64)
    if kind == "bf16x2":
        return bfloat16_to_float32(low).astype(np.float64), bfloat16_to_float32(high).astype(np.float64)
    if kind in ("s16x2", "u16x2"):
        return low, high
    raise Fault(f"unknown packed type {kind}")


def joined(low: Array, high: Array, kind: str) -> Words:
    """A packed register of two numbers."""
    if kind == "f16x2":
        low, high = low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16)
    elif kind == "bf16x2":
        low, high = (float32_to_bfloat16(x.astype(np.float32)) for x in (low, high))
    return low.astype(np.uint16).astype(np.uint64) | high.astype(np.uint16).astype(np.uint64) << np.uint64(16)


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
