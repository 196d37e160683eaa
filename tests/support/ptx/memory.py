"""Memory that a kernel reaches: the tensors of a launch, and a block's shared memory. Outside of them is a fault."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.parsing import Fault
from tests.support.ptx.races import Clocks, GlobalAccesses, Ints, SharedAccesses

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Buffer:
    """A tensor's storage: address and size in bytes, and the bytes that one thread alone may write."""

    address: int
    size: int
    unit: int


class GlobalMemory:
    """The storages of a launch's tensors."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = [each for each in buffers if each.size]
        self.views: list[Bytes] = [
            np.ctypeslib.as_array((ctypes.c_uint8 * each.size).from_address(each.address)) for each in self.buffers
        ]
        self.accesses = GlobalAccesses()

    def load(self, clocks: Clocks, agents: Ints, addresses: Words, nbytes: int, text: str) -> Bytes:
        """Bytes [accesses, nbytes]."""
        loaded = np.zeros((len(addresses), nbytes), np.uint8)
        for place, those, offsets in self._places(addresses, nbytes, text):
            loaded[those] = self.views[place][offsets[:, None] + np.arange(nbytes)]
            units = self._units(place, offsets, nbytes)
            self.accesses.load(clocks, agents[those], place, units, self._count(place), text)
        return loaded

    def store(self, clocks: Clocks, agents: Ints, addresses: Words, stored: Bytes, text: str) -> None:
        nbytes = stored.shape[1]
        for place, those, offsets in self._places(addresses, nbytes, text):
            self.views[place][offsets[:, None] + np.arange(nbytes)] = stored[those]
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
                taken: Bytes = self.views[place][offsets[:, None] + np.arange(nbytes)]
                return taken
        raise Fault(f"{rows} rows of {nbytes} bytes at {address:#x} are outside of all tensors: {text}")

    def _places(self, addresses: Words, nbytes: int, text: str) -> list[tuple[int, Ints, Ints]]:
        """Buffers that addresses lie in: number of each, which accesses are its, and their offsets."""
        if (addresses % np.uint64(nbytes)).any():
            raise Fault(f"misaligned: {text}")
        found, left = [], np.arange(len(addresses))
        for place, each in enumerate(self.buffers):
            if not len(left):
                break
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

    def _units(self, place: int, offsets: Ints, nbytes: int) -> Ints:
        unit = self.buffers[place].unit
        return offsets[:, None] // unit + np.arange(max(nbytes // unit, 1))

    def _count(self, place: int) -> int:
        return self.buffers[place].size // self.buffers[place].unit + 2


class SharedMemory:
    """A block's shared memory. What was never written holds NaN's bits."""

    def __init__(self, nbytes: int, clocks: Clocks, unit: int) -> None:
        self.size = nbytes
        self.bytes: Bytes = np.full(nbytes + 16, 0xFF, np.uint8)
        self.accesses = SharedAccesses(clocks, nbytes, unit)

    def offsets(self, addresses: Words, nbytes: int, text: str) -> Ints:
        """Offsets of accesses of so many bytes.

        Raises:
            Fault: one is misaligned or out of bounds.
        """
        offsets = addresses.astype(np.uint32).astype(np.int64)
        if len(offsets) and (offsets.max() + nbytes > self.size or (offsets % nbytes).any()):
            raise Fault(f"shared memory has {self.size} bytes; misaligned or out of bounds: {text}")
        return offsets

    def load(self, agents: Ints, addresses: Words, nbytes: int, text: str, *, asynchronous: bool = False) -> Bytes:
        """Bytes [accesses, nbytes]."""
        offsets = self.offsets(addresses, nbytes, text)
        self.accesses.load(agents, self.accesses.units(offsets, nbytes), text, asynchronous=asynchronous)
        taken: Bytes = self.bytes[offsets[:, None] + np.arange(nbytes)]
        return taken

    def store(self, agents: Ints, addresses: Words, stored: Bytes, text: str) -> None:
        offsets = self.offsets(addresses, stored.shape[1], text)
        places = offsets[:, None] + np.arange(stored.shape[1])
        units = self.accesses.units(offsets, stored.shape[1])
        self.accesses.store(agents, units, text)
        self.bytes[places] = stored
        if (self.bytes[places] != stored).any():
            # Other threads stored something else there in the same instruction.
            self.accesses.same_instruction(agents, units, text)
