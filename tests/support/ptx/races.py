"""Who knows of whose accesses: vector clocks of a block's warps, of its bulk copies and of its asynchronous products.

Every access carries its agent's time. A later one that conflicts with it is a race unless its agent knows of that time,
by a barrier or by whatever else brought it. Knowledge has a second half, for the tensor cores and bulk copies: a warp's
stores are theirs to see only once a `fence.proxy.async` stood between.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx.parsing import Fault

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Race(Fault):
    """Two accesses to the same bytes, one of them a store, that nothing orders."""


class Knowledge:
    """What can be handed on: up to which time each agent's accesses are known, and are known to be fenced."""

    def __init__(self, agents: int) -> None:
        self.known = np.zeros(agents, np.int64)
        self.fenced = np.zeros(agents, np.int64)

    def join(self, other: "Knowledge") -> None:
        np.maximum(self.known, other.known, out=self.known)
        np.maximum(self.fenced, other.fenced, out=self.fenced)


class Clocks:
    """Knowledge of all agents of a block: its warps, then the bulk copies, then each warpgroup's products."""

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.copies = warps
        self.agents = warps + 1 + -(-warps // 4)
        self.known: Ints = np.zeros((self.agents, self.agents), np.int64)
        self.fenced: Ints = np.zeros((self.agents, self.agents), np.int64)
        np.fill_diagonal(self.known, 1)

    def products_of(self, warpgroup: int) -> int:
        """Agent of a warpgroup's products."""
        return self.warps + 1 + warpgroup

    def time(self, agent: int) -> int:
        return int(self.known[agent, agent])

    def tick(self, agent: int) -> None:
        """Let what an agent does from now on be later than what others know of."""
        self.known[agent, agent] += 1

    def of(self, agent: int) -> Knowledge:
        """What an agent knows now."""
        taken = Knowledge(self.agents)
        taken.known[:] = self.known[agent]
        taken.fenced[:] = self.fenced[agent]
        return taken

    def release(self, agent: int, into: Knowledge) -> None:
        """Add what an agent knows to what others will be told."""
        into.join(self.of(agent))
        self.tick(agent)

    def acquire(self, agent: int, told: Knowledge) -> None:
        np.maximum(self.known[agent], told.known, out=self.known[agent])
        np.maximum(self.fenced[agent], told.fenced, out=self.fenced[agent])

    def meet(self, agents: list[int]) -> None:
        """A barrier of some agents."""
        told = Knowledge(self.agents)
        for agent in agents:
            self.release(agent, told)
        for agent in agents:
            self.acquire(agent, told)

    def act_for(self, agent: int, told: Knowledge) -> None:
        """Let an agent know what another one told it, and of others no more."""
        own = self.time(agent)
        self.known[agent], self.fenced[agent] = told.known, told.fenced
        self.known[agent, agent] = own

    def fence(self, agent: int) -> None:
        """Let the tensor cores and bulk copies see all stores that an agent knows of."""
        np.maximum(self.fenced[agent], self.known[agent], out=self.fenced[agent])
        self.tick(agent)


class SharedAccesses:
    """The last store to each unit of shared memory, and each agent's last load since."""

    def __init__(self, clocks: Clocks, nbytes: int, unit: int) -> None:
        self.clocks, self.unit = clocks, unit
        units = nbytes // unit + 16
        self.writer = np.full(units, -1, np.int16)
        self.written: Ints = np.zeros(units, np.int64)
        self.read: Ints = np.zeros((clocks.agents, units), np.int64)
        # Units whose asynchronous copy was asked for and not waited for.
        self.awaited: Bools = np.zeros(units, np.bool_)

    def units(self, offsets: Ints, nbytes: int) -> Ints:
        """Units [accesses, units each] that accesses of so many bytes reach."""
        count = max(nbytes // self.unit, 1)
        return offsets[:, None] // self.unit + np.arange(count)

    def load(self, agents: Ints, units: Ints, text: str, *, asynchronous: bool = False) -> None:
        """Note loads by agents [accesses] of units [accesses, n]; those of tensor cores need stores to be fenced."""
        who = np.broadcast_to(agents[:, None], units.shape)
        writer, at = self.writer[units], self.written[units]
        self._refuse(self.awaited[units], "a copy that was not waited for is read", text)
        self._refuse((writer >= 0) & (self.clocks.known[who, writer] < at), "read beside a store", text)
        if asynchronous:
            self._refuse(self._unfenced(who, writer, at), "read by the tensor cores without a fence", text)
        self.read[who, units] = self.clocks.known[who, who]

    def store(self, agents: Ints, units: Ints, text: str, *, by_copy: bool = False) -> None:
        """Note stores by agents [accesses] to units [accesses, n]; a bulk copy needs earlier ones to be fenced."""
        who = np.broadcast_to(agents[:, None], units.shape)
        writer, at = self.writer[units], self.written[units]
        self._refuse(self.awaited[units], "a copy that was not waited for is overwritten", text)
        self._refuse((writer >= 0) & (self.clocks.known[who, writer] < at), "written beside a store", text)
        if by_copy:
            self._refuse(self._unfenced(who, writer, at), "overwritten by a bulk copy without a fence", text)
        readers = self.read[:, units]
        self._refuse((readers > self.clocks.known[who].transpose(2, 0, 1)).any(0), "overwritten beside a load", text)
        self.writer[units] = who
        self.written[units] = self.clocks.known[who, who]

    def same_instruction(self, agents: Ints, units: Ints, text: str) -> None:
        """Two warps of one instruction store to the same unit: the later one's name is there."""
        who = np.broadcast_to(agents[:, None], units.shape)
        self._refuse(self.writer[units] != who, "written by two warps at once", text)

    def _unfenced(self, who: Ints, writer: Any, at: Ints) -> Bools:
        by_threads = (writer >= 0) & (writer < self.clocks.warps)
        missing: Bools = by_threads & (self.clocks.fenced[who, writer] < at)
        return missing

    def _refuse(self, bad: Any, what: str, text: str) -> None:
        if bad.any():
            raise Race(f"shared memory is {what}: {text}")


class GlobalAccesses:
    """The last store to and the last load of each unit of the tensors of a launch, over all its blocks.

    Of several agents that read a unit one after another only the last is remembered. Atomics hand on what their
    block knows to the blocks that reach the same address later.
    """

    def __init__(self) -> None:
        self.written: dict[int, Ints] = {}
        self.read: dict[int, Ints] = {}
        self.released: dict[int, dict[int, Ints]] = {}
        self.other_blocks: dict[int, Ints] = {}
        self.block = 0

    def begin(self, block: int) -> None:
        """The next block runs, which knows of no other."""
        self.block, self.other_blocks = block, {}

    def load(self, clocks: Clocks, agents: Ints, place: int, units: Ints, size: int, text: str) -> None:
        written, read = self._of(place, size)
        who = np.broadcast_to(agents[:, None], units.shape)
        self._refuse(clocks, who, written[units], f"a tensor is read beside a store: {text}")
        read[units] = self._stamp(clocks, who)

    def store(self, clocks: Clocks, agents: Ints, place: int, units: Ints, size: int, text: str) -> None:
        written, read = self._of(place, size)
        who = np.broadcast_to(agents[:, None], units.shape)
        self._refuse(clocks, who, written[units], f"a tensor is written beside a store: {text}")
        self._refuse(clocks, who, read[units], f"a tensor is overwritten beside a load: {text}")
        written[units] = self._stamp(clocks, who)

    def atomic(self, clocks: Clocks, warp: int, address: int) -> None:
        """An atomic that acquires and releases."""
        for block, times in self.released.get(address, {}).items():
            known = self.other_blocks.setdefault(block, np.zeros_like(times))
            np.maximum(known, times, out=known)
        told = self.released.setdefault(address, {})
        for block, times in {**self.other_blocks, self.block: clocks.known[warp].copy()}.items():
            told[block] = np.maximum(told[block], times) if block in told else times.copy()
        clocks.tick(warp)

    def _of(self, place: int, size: int) -> tuple[Ints, Ints]:
        if place not in self.written:
            # Zeros that nothing touches take no memory.
            self.written[place], self.read[place] = np.zeros(size, np.int64), np.zeros(size, np.int64)
        return self.written[place], self.read[place]

    def _stamp(self, clocks: Clocks, who: Ints) -> Ints:
        stamp: Ints = ((self.block + 1) << 40) | (who << 32) | clocks.known[who, who]
        return stamp

    def _refuse(self, clocks: Clocks, who: Ints, stamps: Ints, what: str) -> None:
        block, agent, at = (stamps >> 40) - 1, stamps >> 32 & 255, stamps & 0xFFFFFFFF
        here = block == self.block
        bad = here & (clocks.known[who, np.where(here, agent, 0)] < at)
        elsewhere = (block >= 0) & ~here
        if elsewhere.any():
            for other in np.unique(block[elsewhere]):
                known = self.other_blocks.get(int(other))
                those = elsewhere & (block == other)
                bad |= those if known is None else those & (known[np.where(those, agent, 0)] < at)
        if bad.any():
            raise Race(what)
