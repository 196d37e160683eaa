"""Matrices as the threads of a warp hold them in registers, for tensor cores of any type of element."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.values import BITS, Array, bfloat16_to_float32, e4m3_to_float32

if TYPE_CHECKING:
    from tests.support.ptx.block import Block

# Bytes of an element, by type.
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "e4m3": 1}


def numbers_of(bits: Array, kind: str) -> Array:
    """Numbers of unsigned integers of their width."""
    if kind == "e4m3":
        return e4m3_to_float32(bits)
    if kind == "bf16":
        return bfloat16_to_float32(bits)
    return bits.view({"f16": np.float16, "s8": np.int8, "u8": np.uint8}[kind])


def fragments_of(block: "Block", registers: Sequence[str], kind: str) -> Array:
    """float64 [registers, warps, 8, 4, elements]: what thread 4 g + t of each warp holds."""
    words = np.stack([block.words(each, 4) for each in registers])
    bits = words.view(BITS[ELEMENT_BYTES[kind]]).reshape(len(registers), block.warps, 8, 4, -1)
    return numbers_of(bits, kind).astype(np.float64)


def left_fragments(block: "Block", registers: Sequence[str], kind: str) -> Array:
    """Left sides [warps, 16, inner] that warps hold in registers: rows g and g + 8 in turn, then the next columns."""
    held = fragments_of(block, registers, kind)
    by_row = held.reshape(-1, 2, *held.shape[1:]).transpose(2, 1, 3, 0, 4, 5)
    return by_row.reshape(block.warps, 16, -1)
