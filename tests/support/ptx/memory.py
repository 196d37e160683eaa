"""Memory that a kernel reaches: the tensors of a launch, and a block's shared memory. Outside of them is a fault."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.dependents import Dependence, Reached
from tests.support.ptx.parsing import Fault
from tests.support.ptx.races import Clocks, GlobalAccesses, Ints, SharedAccesses

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
# Cells of so many bytes, which NumPy copies as a whole.
_CELLS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.dtype("V16")}


@dataclass(frozen=True)
class Buffer:
    """A tensor's storage: address and size in bytes, the bytes that one thread alone may write, and what keeps it."""

    address: int
    size: int
    unit: int
    held: Any = None


class Cells:
    """Bytes from an address on, read and written in cells that stand at multiples of their size."""

    def __init__(self, held: Bytes, address: int) -> None:
        self.bytes, self.address = held, address
        self._views: dict[int, tuple[Array, int]] = {}

    def view(self, nbytes: int) -> tuple[Array, int]:
        """All whole cells of a size, and the offset of the first.

        Raises:
            Fault: a GPU accesses no such number of bytes.
        """
        if nbytes not in self._views:
            if nbytes not in _CELLS:
                raise Fault(f"{nbytes} bytes are accessed at a time")
            first = -self.address % nbytes
            whole = max(len(self.bytes) - first, 0) // nbytes * nbytes
            self._views[nbytes] = self.bytes[first : first + whole].view(_CELLS[nbytes]), first
        return self._views[nbytes]

    def take(self, offsets: Ints, nbytes: int) -> Array:
        view, first = self.view(nbytes)
        taken: Array = view.take((offsets - first) // nbytes)
        return taken

    def put(self, offsets: Ints, values: Array) -> None:
        """Write rows of bytes."""
        nbytes = values.itemsize * values.shape[1]
        view, first = self.view(nbytes)
        view[(offsets - first) // nbytes] = np.ascontiguousarray(values).view(view.dtype)[:, 0]


class GlobalMemory:
    """The storages of a launch's tensors."""

    def __init__(self, buffers: Sequence[Buffer], before: Sequence[Reached] = ()) -> None:
        self.dependence = Dependence(before)
        self.buffers = [each for each in buffers if each.size]
        self.cells = [
            Cells(np.ctypeslib.as_array((ctypes.c_uint8 * each.size).from_address(each.address)), each.address)
            for each in self.buffers
        ]
        self.accesses = GlobalAccesses()

    def load(self, clocks: Clocks, agents: Ints, addresses: Array, nbytes: int, text: str) -> Array:
        """A cell for each access."""
        self.dependence.check(agents, addresses, nbytes, text, stores=False)
        loaded = np.zeros(len(addresses), _CELLS.get(nbytes, np.uint8))
        for place, those, offsets in self._places(addresses, nbytes, text):
            loaded[those] = self.cells[place].take(offsets, nbytes)
            units = self._units(place, offsets, nbytes)
            self.accesses.load(clocks, agents[those], place, units, self._count(place), text)
        return loaded

    def store(self, clocks: Clocks, agents: Ints, addresses: Array, stored: Array, text: str) -> None:
        """Store words [accesses, n]."""
        nbytes = stored.itemsize * stored.shape[1]
        self.dependence.check(agents, addresses, nbytes, text, stores=True)
        for place, those, offsets in self._places(addresses, nbytes, text):
            self.cells[place].put(offsets, stored[those])
            units = self._units(place, offsets, nbytes)
            self.accesses.store(clocks, agents[those], place, units, self._count(place), text)

    def matrix(self, clocks: Clocks, agent: int, address: int, rows: int, stride: int, nbytes: int, text: str) -> Bytes:
        """Bytes [rows, nbytes] that a bulk copy reads, each row `stride` behind the one before.

        Raises:
            Fault: they are not within one tensor.
        """
        end = address + (rows - 1) * stride + nbytes
        for place, each in enumerate(self.buffers):
            if each.address <= address and end <= each.address + each.size:
                offsets = address - each.address + np.arange(rows) * stride
                units = self._units(place, offsets, nbytes)
                self.accesses.load(clocks, np.full(rows, agent), place, units, self._count(place), text)
                taken: Bytes = self.cells[place].bytes[offsets[:, None] + np.arange(nbytes)]
                return taken
        raise Fault(f"{rows} rows of {nbytes} bytes at {address:#x} are outside of all tensors: {text}")

    def _places(self, addresses: Array, nbytes: int, text: str) -> list[tuple[int, Any, Ints]]:
        """Buffers that addresses lie in: number of each, which accesses are its, and their offsets."""
        if (addresses % np.uint64(nbytes)).any():
            raise Fault(f"misaligned: {text}")
        first, last = int(addresses.min()), int(addresses.max()) + nbytes
        for place, each in enumerate(self.buffers):
            if each.address <= first and last <= each.address + each.size:
                return [(place, slice(None), (addresses - np.uint64(each.address)).astype(np.int64))]
        found, left = [], np.arange(len(addresses))
        for place, each in enumerate(self.buffers):
            here = addresses[left]
            inside = (here >= np.uint64(each.address)) & (
                here + np.uint64(nbytes) <= np.uint64(each.address + each.size)
            )
            if inside.any():
                those = left[inside]
                found.append((place, those, (addresses[those] - np.uint64(each.address)).astype(np.int64)))
                left = left[~inside]
        if len(left):
            raise Fault(f"{int(addresses[left[0]]):#x} is outside of all tensors: {text}")
        return found

    def reached(self) -> list[Reached]:
        """What all blocks loaded and stored."""
        places = [place for place in range(len(self.buffers)) if place in self.accesses.written]
        stamps = [(self.buffers[p], self.accesses.read[p] > 0, self.accesses.written[p] > 0) for p in places]
        return [Reached(each.address, each.unit, loaded, stored, each.held) for each, loaded, stored in stamps]

    def begin(self, block: int) -> None:
        """The next block runs."""
        self.accesses.begin(block)
        self.dependence.begin()

    def _units(self, place: int, offsets: Ints, nbytes: int) -> Ints:
        unit = self.buffers[place].unit
        return offsets[:, None] // unit + np.arange(max(nbytes // unit, 1))

    def _count(self, place: int) -> int:
        return self.buffers[place].size // self.buffers[place].unit + 2


class SharedMemory:
    """A block's shared memory. What was never written holds NaN's bits."""

    def __init__(self, nbytes: int, clocks: Clocks, unit: int) -> None:
        self.size = nbytes
        self.bytes: Bytes = np.full(nbytes + 16 - nbytes % 16, 0xFF, np.uint8)
        self.cells = Cells(self.bytes, 0)
        self.accesses = SharedAccesses(clocks, nbytes, unit)

    def offsets(self, addresses: Array, nbytes: int, text: str) -> Ints:
        """Offsets of accesses of so many bytes.

        Raises:
            Fault: one is misaligned or out of bounds.
        """
        offsets = addresses.astype(np.uint32).astype(np.int64)
        if len(offsets) and (offsets.max() + nbytes > self.size or (offsets % nbytes).any()):
            raise Fault(f"shared memory has {self.size} bytes; misaligned or out of bounds: {text}")
        return offsets

    def load(self, agents: Ints, addresses: Array, nbytes: int, text: str) -> Array:
        """A cell for each access."""
        offsets = self.offsets(addresses, nbytes, text)
        self.accesses.load(agents, self.accesses.units(offsets, nbytes), text)
        return self.cells.take(offsets, nbytes)

    def store(self, agents: Ints, addresses: Array, stored: Array, text: str) -> None:
        """Store words [accesses, n]."""
        nbytes = stored.itemsize * stored.shape[1]
        offsets = self.offsets(addresses, nbytes, text)
        units = self.accesses.units(offsets, nbytes)
        self.accesses.store(agents, units, text)
        self.cells.put(offsets, stored)
        if not np.array_equal(self.cells.take(offsets, nbytes).view(stored.dtype), stored.reshape(-1)):
            # Other threads stored something else there in the same instruction.
            self.accesses.same_instruction(agents, units, text)
