"""Hopper's asynchronous products (wgmma).

Such a product is computed when its warpgroup waits for it, from what registers and shared memory hold
by then. Until then nobody may touch its registers or overwrite its operands.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, lru_cache
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
        # Registers that nobody may write, or touch at all.
        self.busy: frozenset[str] = frozenset()

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
        shape, (results, left, right, adds) = (
            _shape(instruction.parts, instruction.operands[4:]),
            instruction.operands[:4],
        )
        in_registers, text = left.startswith("{"), instruction.text[:80]
        at_left = None if in_registers else self._operand(warpgroup, left, shape, 64, shape.left_transposed, text)
        at_right = self._operand(warpgroup, right, shape, shape.columns, shape.right_transposed, text)
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
        self.busy |= product.written | product.read

    def commit(self, warpgroup: int) -> None:
        self.groups[warpgroup].append(self.open.pop(warpgroup, []))

    def wait(self, warpgroup: int, most: int) -> None:
        """Compute groups until so many are left; the warpgroup knows that they are done."""
        clocks, agent = self.block.clocks, self.block.clocks.products_of(warpgroup)
        while len(self.groups[warpgroup]) > most:
            for product in self.groups[warpgroup].pop(0):
                self._compute(warpgroup, product)
                clocks.known[4 * warpgroup : 4 * warpgroup + 4, agent] = product.time
        left = [*self.open.values(), *(group for groups in self.groups.values() for group in groups)]
        self.busy = frozenset(name for group in left for product in group for name in product.written | product.read)

    def _operand(
        self, warpgroup: int, descriptor: str, shape: "_Shape", outer: int, transposed: bool, text: str
    ) -> Ints:
        """Offsets [outer, inner] of the elements of a matrix in shared memory, which is read from now on."""
        clocks, accesses = self.block.clocks, self.block.shared.accesses
        bits = self._word(descriptor, warpgroup)
        offsets, units = _places(bits, outer, shape.inner, shape.size, transposed, accesses.unit)
        if (last := int(offsets.max()) + shape.size) > self.block.shared.size:
            raise Fault(f"a product reads beyond shared memory, at {last - shape.size}")
        agent, warps = clocks.products_of(warpgroup), slice(4 * warpgroup, 4 * warpgroup + 4)
        # What all four warps know.
        own = clocks.time(agent)
        clocks.known[agent], clocks.fenced[agent] = clocks.known[warps].min(0), clocks.fenced[warps].min(0)
        clocks.known[agent, agent] = own
        accesses.load(np.full(len(units), agent), units, text, asynchronous=True)
        return offsets

    def _word(self, operand: str, warpgroup: int) -> int:
        words = self.block.words(operand, 8)[128 * warpgroup : 128 * warpgroup + 128]
        if (words != words[0]).any():
            raise Fault(f"threads of a warpgroup disagree on {operand}")
        return int(words[0])

    def _compute(self, warpgroup: int, under_way: Product) -> None:
        block, instruction = self.block, under_way.instruction
        shape, names = _shape(instruction.parts, instruction.operands[4:]), elements(instruction.operands[0])
        threads = slice(128 * warpgroup, 128 * warpgroup + 128)
        if under_way.left is None:
            fragments = left_fragments(block, elements(instruction.operands[1]), shape.left)
            a = fragments[4 * warpgroup : 4 * warpgroup + 4].reshape(64, -1)
        else:
            a = self._matrix(under_way.left, shape.left)
        product = a @ self._matrix(under_way.right, shape.right).T
        # Thread 4 g + t holds, of its warp's sixteen, rows g and g + 8, and of each eight columns 2 t and 2 t + 1.
        result = product.reshape(4, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(len(names), 128)
        none = np.zeros(block.threads, np.uint32)
        words = np.stack([none if block.registers.get(name) is None else block.words(name, 4) for name in names])
        if under_way.adds:
            result = result + from_words(words[:, threads], shape.total)
        words[:, threads] = to_words(result, shape.total)
        block.registers.update(zip(names, words, strict=True))

    def _matrix(self, offsets: Ints, kind: str) -> Array:
        """float64 numbers at offsets of shared memory."""
        return numbers_of(self.block.shared.cells.take(offsets, ELEMENT_BYTES[kind]), kind).astype(np.float64)


@lru_cache(1024)
def _places(bits: int, outer: int, inner: int, size: int, transposed: bool, unit: int) -> tuple[Ints, Ints]:
    """Offsets [outer, inner] of the elements that a descriptor means, and the units [n, 1] of shared memory there."""
    start, leading, stride = (bits >> shift & 0x3FFF for shift in (0, 16, 32))
    swizzle = bits >> 62
    o, k = np.arange(outer)[:, None], np.arange(inner)[None, :]
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
    return places, np.unique(places // unit)[:, None]


class _Shape:
    """What an asynchronous product's name and last operands say."""

    def __init__(self, parts: tuple[str, ...], options: tuple[str, ...]) -> None:
        name = ".".join(parts)
        found = re.search(r"m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)", name)
        if not found or found[4] not in ELEMENT_BYTES or found[3] not in ("f32", "s32"):
            raise Fault(f"unknown product: {name}")
        self.columns, self.inner = int(found[1]), int(found[2])
        self.total, self.left, self.right = found[3], found[4], found[5]
        self.size = ELEMENT_BYTES[self.left]
        # Behind the descriptors: whether to add, two signs (not of integers), and what is transposed (of 16 bits).
        last = [int(each, 0) for each in options]
        if any(sign != 1 for sign in last[:2]):
            raise Fault(f"unknown signs: {name} {options}")
        transposed = last[2:]
        self.right_transposed = bool(transposed and transposed[-1])
        self.left_transposed = bool(len(transposed) == 2 and transposed[0])


_shape = cache(_Shape)
