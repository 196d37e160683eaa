"""Hopper's asynchronous products (wgmma).

Such a product is computed when its warpgroup waits for it, from what registers and shared memory hold
by then. Until then nobody may touch its registers or overwrite its operands.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.fragments import ELEMENT_BYTES, left_fragments, numbers_of
from tests.support.ptx.parsing import Fault, Instruction, elements
from tests.support.ptx.races import Bools, Ints
from tests.support.ptx.values import Array, from_words, to_words

if TYPE_CHECKING:
    from tests.support.ptx.block import Block

# Bytes of a row of a swizzled matrix, and address bits that are exchanged, by a descriptor's number.
_ROW_BYTES = {1: 128, 2: 64, 3: 32}
_SWIZZLES = {0: 0, 1: 7, 2: 3, 3: 1}


@dataclass
class Product:
    """An asynchronous product under way.

    Attributes:
        written, read: registers of its results, and of its left side where that is not in shared memory.
        left, right: offsets of its operands in shared memory.
        adds: whether it adds to its results.
    """

    instruction: Instruction
    written: frozenset[str]
    read: frozenset[str]
    left: Ints | None
    right: Ints
    adds: bool
    time: int


class Products:
    """Asynchronous products of a block's warpgroups: not yet in a group, and groups in order."""

    def __init__(self, block: "Block") -> None:
        self.block = block
        self.open: dict[int, list[Product]] = defaultdict(list)
        self.groups: dict[int, list[list[Product]]] = defaultdict(list)
        self.under_way = 0

    def check_registers(self, instruction: Instruction, mask: Bools) -> None:
        """Refuse an instruction that touches registers of a product under way.

        Raises:
            Fault: it does.
        """
        if instruction.opcode == "wgmma":
            return
        for warpgroup in np.unique(self.block.warp[mask] // 4):
            for group in (self.open[warpgroup], *self.groups[warpgroup]):
                for product in group:
                    target = elements(instruction.operands[0]) if instruction.operands else []
                    if instruction.names & product.written or product.read & set(target):
                        raise Fault(
                            f"registers of a product that was not waited for: {instruction.text}, "
                            f"beside {product.instruction.text[:60]}..."
                        )

    def begin(self, warpgroup: int, instruction: Instruction) -> None:
        """Let a product begin: its operands in shared memory are read from now on."""
        shape, (results, left, right, adds) = _Shape(instruction), instruction.operands[:4]
        in_registers = left.startswith("{")
        at_left = None if in_registers else self._places(warpgroup, left, shape, 64, shape.left_transposed)
        at_right = self._places(warpgroup, right, shape, shape.columns, shape.right_transposed)
        for places in (at_left, at_right):
            if places is not None:
                self._note_reads(warpgroup, places.reshape(-1), instruction.text)
        clocks, agent = self.block.clocks, self.block.clocks.products_of(warpgroup)
        product = Product(
            instruction,
            frozenset(elements(results)),
            frozenset(elements(left)) if in_registers else frozenset(),
            at_left,
            at_right,
            bool(self.block.read(adds, "pred")[128 * warpgroup]),
            clocks.time(agent),
        )
        self.open[warpgroup].append(product)
        clocks.tick(agent)
        self.under_way += 1

    def commit(self, warpgroup: int) -> None:
        self.groups[warpgroup].append(self.open.pop(warpgroup, []))

    def wait(self, warpgroup: int, most: int) -> None:
        """Compute groups until so many are left; the warpgroup knows that they are done."""
        clocks, agent = self.block.clocks, self.block.clocks.products_of(warpgroup)
        while len(self.groups[warpgroup]) > most:
            for product in self.groups[warpgroup].pop(0):
                self._compute(warpgroup, product)
                self.under_way -= 1
                clocks.known[4 * warpgroup : 4 * warpgroup + 4, agent] = product.time

    def _note_reads(self, warpgroup: int, offsets: Ints, text: str) -> None:
        clocks, accesses = self.block.clocks, self.block.shared.accesses
        agent, warps = clocks.products_of(warpgroup), slice(4 * warpgroup, 4 * warpgroup + 4)
        # What all four warps know.
        own = clocks.time(agent)
        clocks.known[agent], clocks.fenced[agent] = clocks.known[warps].min(0), clocks.fenced[warps].min(0)
        clocks.known[agent, agent] = own
        units = np.unique(offsets // accesses.unit)[:, None]
        accesses.load(np.full(len(units), agent), units, text[:80], asynchronous=True)

    def _places(self, warpgroup: int, descriptor: str, shape: "_Shape", outer: int, transposed: bool) -> Ints:
        """Offsets [outer, inner] of a matrix's elements."""
        bits = self._word(descriptor, warpgroup)
        start, leading, stride = (bits >> shift & 0x3FFF for shift in (0, 16, 32))
        swizzle, size = bits >> 62, shape.size
        o, k = np.arange(outer)[:, None], np.arange(shape.inner)[None, :]
        places: Ints
        if transposed:
            in_row = _ROW_BYTES[swizzle] // size
            places = 16 * (start + o // in_row * leading + k // 8 * stride) + k % 8 * in_row * size + o % in_row * size
        elif swizzle:
            places = 16 * (start + o // 8 * stride) + o % 8 * _ROW_BYTES[swizzle] + k * size
        else:
            in_row = 16 // size
            places = 16 * (start + o // 8 * stride + k // in_row * leading) + o % 8 * 16 + k % in_row * size
        places = places ^ ((places >> 7 & _SWIZZLES[swizzle]) << 4)
        if places.max() + size > self.block.shared.size:
            raise Fault(f"a product reads beyond shared memory, at {int(places.max())}")
        return places

    def _word(self, operand: str, warpgroup: int) -> int:
        words = self.block.raw(operand)[128 * warpgroup : 128 * warpgroup + 128]
        if (words != words[0]).any():
            raise Fault(f"threads of a warpgroup disagree on {operand}")
        return int(words[0])

    def _compute(self, warpgroup: int, under_way: Product) -> None:
        block, instruction, shape = self.block, under_way.instruction, _Shape(under_way.instruction)
        threads = slice(128 * warpgroup, 128 * warpgroup + 128)
        if under_way.left is None:
            fragments = left_fragments(block, elements(instruction.operands[1]), shape.left)
            a = fragments[4 * warpgroup : 4 * warpgroup + 4].reshape(64, -1)
        else:
            a = self._matrix(under_way.left, shape.left)
        b = self._matrix(under_way.right, shape.right)
        product = a.astype(np.float64) @ b.astype(np.float64).T
        by_warp = product.reshape(4, 16, shape.columns)
        lane = np.arange(32)
        for number, register in enumerate(elements(instruction.operands[0])):
            row = lane // 4 + 8 * (number // 2 % 2)
            column = number // 4 * 8 + lane % 4 * 2 + number % 2
            result = by_warp[:, row, column].reshape(-1)
            held = block.registers.get(register)
            words = np.zeros(block.threads, np.uint64) if held is None else held.copy()
            if under_way.adds:
                result = result + from_words(words[threads], shape.total)
            words[threads] = to_words(result, shape.total)
            block.registers[register] = words

    def _matrix(self, places: Ints, kind: str) -> Array:
        held = self.block.shared.bytes
        return numbers_of(np.stack([held[places + byte] for byte in range(ELEMENT_BYTES[kind])], -1), kind)


class _Shape:
    """What an asynchronous product's name and last operands say."""

    def __init__(self, instruction: Instruction) -> None:
        found = re.search(r"m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)", ".".join(instruction.parts))
        if not found or found[4] not in ELEMENT_BYTES or found[3] not in ("f32", "s32"):
            raise Fault(f"unknown product: {instruction.text[:90]}")
        self.columns, self.inner = int(found[1]), int(found[2])
        self.total, self.left, self.right = found[3], found[4], found[5]
        self.size = ELEMENT_BYTES[self.left]
        # Behind the descriptors: whether to add, two signs (not of integers), and what is transposed (of 16 bits).
        last = [int(each, 0) for each in instruction.operands[4:]]
        if any(sign != 1 for sign in last[:2]):
            raise Fault(f"unknown signs: {instruction.text[:90]}")
        transposed = last[2:]
        self.right_transposed = bool(transposed and transposed[-1])
        self.left_transposed = bool(len(transposed) == 2 and transposed[0])
