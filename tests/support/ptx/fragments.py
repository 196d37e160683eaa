"""Matrices as the threads of a warp hold them in registers, for tensor cores of any type of element."""

from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.memory import Bytes
from tests.support.ptx.values import Array, bfloat16_to_float32, e4m3_to_float32

if TYPE_CHECKING:
    from tests.support.ptx.block import Block

# Bytes of an element, by type.
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "e4m3": 1}


def numbers_of(stored: Bytes, kind: str) -> Array:
    """Numbers [...] of bytes [..., size]."""
    if kind == "e4m3":
        return e4m3_to_float32(stored[..., 0])
    if kind in ("s8", "u8"):
        return stored[..., 0].view(np.int8 if kind == "s8" else np.uint8)
    bits = np.ascontiguousarray(stored).view(np.uint16)[..., 0]
    return bits.view(np.float16) if kind == "f16" else bfloat16_to_float32(bits)


def elements_of(block: "Block", register: str, kind: str) -> Array:
    """A register's elements [warps, 32, elements]."""
    stored = np.ascontiguousarray(block.raw(register).astype(np.uint32)).view(np.uint8).reshape(block.warps, 32, 4)
    return numbers_of(stored.reshape(block.warps, 32, 4 // ELEMENT_BYTES[kind], ELEMENT_BYTES[kind]), kind)


def left_fragments(block: "Block", registers: list[str], kind: str) -> Array:
    """Left sides [warps, 16, inner] that warps hold in registers."""
    count, lane = 4 // ELEMENT_BYTES[kind], np.arange(32)
    matrix = np.zeros((block.warps, 16, 2 * len(registers) * count), np.float64)
    for number, register in enumerate(registers):
        values = elements_of(block, register, kind)
        for each in range(count):
            column = lane % 4 * count + each + 4 * count * (number // 2)
            matrix[:, lane // 4 + 8 * (number % 2), column] = values[..., each]
    return matrix
