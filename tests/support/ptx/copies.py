"""Asynchronous copies and the barriers that count them: cp.async, mbarriers, and Hopper's bulk copies by tensor map.

Only mbarrier operations may access the memory of a valid mbarrier, and it may be initialized again only after
`mbarrier.inval` (PTX ISA, mbarrier.init).

A cp.async is done when its thread waits for its group. A bulk copy lands when nothing else can go on, which is as late
as its barrier allows, and then ends its part of the barrier's phase.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.parsing import Fault
from tests.support.ptx.races import Ints, Knowledge, Race
from tests.support.ptx.values import Array

if TYPE_CHECKING:
    from tests.support.ptx.block import Block


_BARRIER_BYTES = 8


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for, and what those who arrived knew.

    `initialized` is the warp that initialized it, and when.
    """

    count: int
    pending: int
    gathered: Knowledge
    told: Knowledge
    initialized: tuple[int, int]
    nbytes: int = 0
    phase: int = 0


@dataclass(frozen=True)
class BulkCopy:
    """A bulk copy under way: where it goes, by which tensor map, from where on, and who is told."""

    target: int
    tensor_map: int
    coordinates: tuple[int, ...]
    barrier: int
    warp: int
    known: Knowledge
    text: str


@dataclass(frozen=True)
class AsyncCopy:
    """A cp.async of some threads: numbers of the threads, places in shared memory, sources, bytes each, bytes read."""

    threads: Ints
    targets: Array
    sources: Array
    nbytes: int
    read: Ints
    text: str


class Copies:
    """A block's mbarriers and copies under way."""

    def __init__(self, block: "Block") -> None:
        self.block = block
        self.barriers: dict[int, Barrier] = {}
        self.bulk: list[BulkCopy] = []
        # Of each warp: copies not yet in a group, and its groups in order.
        self.open: dict[int, list[AsyncCopy]] = defaultdict(list)
        self.groups: dict[int, list[list[AsyncCopy]]] = defaultdict(list)

    def state(self) -> str:
        """Barriers, in words."""
        return ", ".join(
            f"{at}: phase {b.phase}, {b.pending} of {b.count} arrivals and {b.nbytes} bytes missing"
            for at, b in self.barriers.items()
        )

    # mbarriers

    def init(self, address: int, count: int, warp: int, text: str) -> None:
        accesses, clocks = self.block.shared.accesses, self.block.clocks
        units = self._units(address, text)
        if accesses.barriers.take(units).any():
            raise Fault(f"a valid mbarrier is initialized again without mbarrier.inval: {text}")
        accesses.store(np.array([warp]), units, text)
        accesses.barriers[units] = True
        told = Knowledge(clocks.agents), Knowledge(clocks.agents)
        self.barriers[address] = Barrier(count, count, *told, (warp, clocks.time(warp)))
        clocks.tick(warp)

    def invalidate(self, address: int, warp: int, text: str) -> None:
        self.barrier(address, warp, text)
        del self.barriers[address]
        accesses, units = self.block.shared.accesses, self._units(address, text)
        accesses.barriers[units] = False
        accesses.store(np.array([warp]), units, text)

    def _units(self, address: int, text: str) -> Ints:
        offsets = self.block.shared.offsets(np.array([address]), _BARRIER_BYTES, text)
        return self.block.shared.accesses.units(offsets, _BARRIER_BYTES)

    def barrier(self, address: int, agent: int, text: str) -> Barrier:
        """The mbarrier at an address, whose initialization an agent must know of."""
        if address not in self.barriers:
            raise Fault(f"no mbarrier is at {address}: {text}")
        barrier = self.barriers[address]
        warp, time = barrier.initialized
        if self.block.clocks.known[agent, warp] < time:
            raise Race(f"an mbarrier is used beside its initialization: {text}")
        return barrier

    def arrive(self, address: int, warp: int, nbytes: int, text: str) -> None:
        """An arrival by a thread of a warp, which announces so many bytes."""
        barrier = self.barrier(address, warp, text)
        if barrier.pending == 0:
            raise Fault(f"more arrivals than a phase of the mbarrier has: {text}")
        barrier.pending -= 1
        barrier.nbytes += nbytes
        self.block.clocks.release(warp, barrier.gathered)
        self._end_phase(barrier)

    def passed(self, address: int, parity: int, warp: int, text: str) -> bool:
        """Whether the phase of a parity is over; then its waiter knows what those who arrived knew."""
        barrier = self.barrier(address, warp, text)
        if barrier.phase % 2 == parity:
            return False
        self.block.clocks.acquire(warp, barrier.told)
        return True

    def _end_phase(self, barrier: Barrier) -> None:
        if barrier.pending == 0 and barrier.nbytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            barrier.told.join(barrier.gathered)
            self.block.spinning[:] = False

    # Bulk copies

    def land_one(self) -> bool:
        """Let the oldest bulk copy land; whether there was one."""
        if not self.bulk:
            return False
        copy = self.bulk.pop(0)
        fields = self.block.tensor_maps.get(copy.tensor_map)
        if fields is None:
            raise Fault(f"no tensor map is at {copy.tensor_map:#x}: {copy.text}")
        nbytes = self._copy_box(copy, fields)
        clocks = self.block.clocks
        barrier = self.barrier(copy.barrier, clocks.copies, copy.text)
        barrier.nbytes -= nbytes
        clocks.release(clocks.copies, barrier.gathered)
        self._end_phase(barrier)
        self.block.spinning[:] = False
        return True

    def _copy_box(self, copy: BulkCopy, fields: dict[str, int]) -> int:
        """Copy a box with zeros outside of the matrix, swizzled; its number of bytes."""
        block, clocks = self.block, self.block.clocks
        element, swizzle = ELEMENT_BYTES[fields.get("elemtype", 0)], _SWIZZLES[fields.get("swizzle_mode", 0)]
        width, height = fields["box_dim 0"] * element, fields.get("box_dim 1", 1)
        columns, rows = fields["global_dim 0"] * element, fields.get("global_dim 1", 1)
        x, y = copy.coordinates[0] * element, (*copy.coordinates, 0)[1]
        if copy.target % (128 if swizzle else 16):
            raise Fault(f"a box is brought to {copy.target}, which is not aligned: {copy.text}")
        values = np.zeros((height, width), np.uint8)
        left, right, top, bottom = max(x, 0), min(x + width, columns), max(y, 0), min(y + height, rows)
        # A copy does what the thread that asked for it may do.
        clocks.act_for(clocks.copies, copy.known)
        if right > left and bottom > top:
            stride = fields.get("global_stride 0", 0)
            at = fields["global_address"] + top * stride + left
            values[top - y : bottom - y, left - x : right - x] = block.memory.matrix(
                clocks, clocks.copies, at, bottom - top, stride, right - left, copy.text
            )
        offsets = copy.target + np.arange(height * width)
        offsets ^= (offsets >> 7 & swizzle) << 4
        if offsets.max() >= block.shared.size:
            raise Fault(f"a box {fields} to {copy.target} is brought beyond shared memory: {copy.text}")
        accesses = block.shared.accesses
        units = accesses.units(offsets[:: accesses.unit], accesses.unit)
        accesses.store(np.full(len(units), clocks.copies), units, copy.text, by_copy=True)
        block.shared.bytes[offsets] = values.reshape(-1)
        return height * width

    # cp.async

    def ask(self, copy: AsyncCopy) -> None:
        """Begin a copy: its bytes may be touched once its group was waited for."""
        accesses = self.block.shared.accesses
        offsets = self.block.shared.offsets(copy.targets, copy.nbytes, copy.text)
        units = accesses.units(offsets, copy.nbytes)
        accesses.store(self.block.warp[copy.threads], units, copy.text)
        accesses.awaited[units] = True
        for warp in np.unique(self.block.warp[copy.threads]):
            those = self.block.warp[copy.threads] == warp
            part = AsyncCopy(
                copy.threads[those], copy.targets[those], copy.sources[those], copy.nbytes, copy.read[those], copy.text
            )
            self.open[int(warp)].append(part)

    def commit(self, warp: int) -> None:
        self.groups[warp].append(self.open.pop(warp, []))

    def wait(self, warp: int, most: int) -> None:
        """End groups until so many are left."""
        while len(self.groups[warp]) > most:
            for copy in self.groups[warp].pop(0):
                self._finish(copy)

    def _finish(self, copy: AsyncCopy) -> None:
        block = self.block
        values = np.zeros((len(copy.threads), copy.nbytes), np.uint8)
        for size in np.unique(copy.read):
            # What lies behind the bytes that are read becomes zeros.
            those = np.nonzero(copy.read == size)[0]
            if size:
                agents = block.warp[copy.threads[those]]
                cells = block.memory.load(block.clocks, agents, copy.sources[those], int(size), copy.text)
                values[those, :size] = cells.view(np.uint8).reshape(-1, size)
        offsets = block.shared.offsets(copy.targets, copy.nbytes, copy.text)
        block.shared.accesses.awaited[block.shared.accesses.units(offsets, copy.nbytes)] = False
        block.shared.store(block.warp[copy.threads], copy.targets, values, copy.text)


# Bytes of a tensor map's element types, and address bits that its swizzles exchange, by their numbers.
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 8, 10: 2}
_SWIZZLES = {0: 0, 1: 1, 2: 3, 3: 7}
