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
# Bits of an agent's time in a stamp of shared memory.
_TIME = 40
_TIMES = (1 << _TIME) - 1


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
        # Barriers of all warps so far, and the last one up to which every warp knows of every access.
        self.meetings, self.settled = 0, -1
        # When the bulk copies and each warpgroup's products last accessed anything.
        self.acted: Ints = np.zeros(self.agents, np.int64)

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
        if len(agents) == self.warps:
            if (self.known[: self.warps, self.warps :] >= self.acted[self.warps :]).all():
                self.settled = self.meetings
            self.meetings += 1

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
    """The last store to each unit of shared memory, and each agent's last load since.

    A stamp is the number of the agent, from 1 on, before its time. `touched` has the barriers of all warps that were
    before a unit's last access: most accesses stand behind a barrier that settled all earlier ones.
    """

    def __init__(self, clocks: Clocks, nbytes: int, unit: int) -> None:
        self.clocks, self.unit = clocks, unit
        self.count = nbytes // unit + 16
        self.stored: Ints = np.zeros(self.count, np.int64)
        self.read: Ints = np.zeros((clocks.agents, self.count), np.int64)
        self.touched: Ints = np.full(self.count, -1, np.int64)
        # Units whose asynchronous copy was asked for and not waited for.
        self.awaited: Bools = np.zeros(self.count, np.bool_)
        # Units of valid mbarriers: initialized and not invalidated.
        self.barriers: Bools = np.zeros(self.count, np.bool_)

    def units(self, offsets: Ints, nbytes: int) -> Ints:
        """Units [accesses, units each] that accesses of so many bytes reach."""
        count = max(nbytes // self.unit, 1)
        return offsets[:, None] // self.unit + np.arange(count)

    def load(self, agents: Ints, units: Ints, text: str, *, asynchronous: bool = False) -> None:
        """Note loads by agents [accesses] of units [accesses, n]; those of tensor cores need stores to be fenced."""
        self._refuse(self.barriers.take(units), "that of a valid mbarrier and is read", text)
        self._refuse(self.awaited.take(units), "a copy that was not waited for is read", text)
        if asynchronous or self.touched.take(units).max() > self.clocks.settled:
            place, at = self._last(agents, units)
            self._refuse(self.clocks.known.take(place) < at, "read beside a store", text)
            if asynchronous:
                self._refuse(self._unfenced(place, at), "read by the tensor cores without a fence", text)
        times = self.clocks.known.diagonal()[agents]
        self.read.reshape(-1)[agents[:, None] * self.count + units] = times[:, None]
        self._touch(agents, units)

    def store(self, agents: Ints, units: Ints, text: str, *, by_copy: bool = False) -> None:
        """Note stores by agents [accesses] to units [accesses, n]; a bulk copy needs earlier ones to be fenced."""
        self._refuse(self.barriers.take(units), "that of a valid mbarrier and is written", text)
        self._refuse(self.awaited.take(units), "a copy that was not waited for is overwritten", text)
        if by_copy or self.touched.take(units).max() > self.clocks.settled:
            place, at = self._last(agents, units)
            self._refuse(self.clocks.known.take(place) < at, "written beside a store", text)
            if by_copy:
                self._refuse(self._unfenced(place, at), "overwritten by a bulk copy without a fence", text)
            known = self.clocks.known[agents].T[:, :, None]
            self._refuse(self.read.take(units, 1) > known, "overwritten beside a load", text)
        times = self.clocks.known.diagonal()[agents]
        self.stored[units] = (agents + 1 << _TIME | times)[:, None]
        self._touch(agents, units)

    def same_instruction(self, agents: Ints, units: Ints, text: str) -> None:
        """Two warps of one instruction store to the same unit: the later one's name is there."""
        self._refuse(self.stored[units] >> _TIME != agents[:, None] + 1, "written by two warps at once", text)

    def _last(self, agents: Ints, units: Ints) -> tuple[Ints, Ints]:
        """Of the last stores: where in the clocks stands what agents know of them, and their times."""
        stamps = self.stored.take(units)
        # Of what nobody wrote the time is 0, of which everyone knows.
        return agents[:, None] * self.clocks.agents + np.maximum((stamps >> _TIME) - 1, 0), stamps & _TIMES

    def _touch(self, agents: Ints, units: Ints) -> None:
        self.touched[units] = self.clocks.meetings
        if agents[0] >= self.clocks.warps:
            self.clocks.acted[agents[0]] = self.clocks.time(agents[0])

    def _unfenced(self, place: Ints, at: Ints) -> Bools:
        by_threads = place % self.clocks.agents < self.clocks.warps
        missing: Bools = by_threads & (self.clocks.fenced.take(place) < at)
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
        self.stored_to: set[int] = set()
        self.released: dict[int, dict[int, Ints]] = {}
        self.other_blocks: dict[int, Ints] = {}
        self.block = 0

    def begin(self, block: int) -> None:
        """The next block runs, which knows of no other."""
        self.block, self.other_blocks = block, {}

    def load(self, clocks: Clocks, agents: Ints, place: int, units: Ints, size: int, text: str) -> None:
        written, read = self._of(place, size)
        if place in self.stored_to:
            self._refuse(clocks, agents, written.take(units), f"a tensor is read beside a store: {text}")
        read[units] = self._stamp(clocks, agents)

    def store(self, clocks: Clocks, agents: Ints, place: int, units: Ints, size: int, text: str) -> None:
        written, read = self._of(place, size)
        self._refuse(clocks, agents, written.take(units), f"a tensor is written beside a store: {text}")
        self._refuse(clocks, agents, read.take(units), f"a tensor is overwritten beside a load: {text}")
        written[units] = self._stamp(clocks, agents)
        self.stored_to.add(place)

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

    def _stamp(self, clocks: Clocks, agents: Ints) -> Ints:
        stamp: Ints = (self.block + 1) << 40 | agents << 32 | clocks.known.diagonal()[agents]
        return stamp[:, None]

    def _refuse(self, clocks: Clocks, agents: Ints, stamps: Ints, what: str) -> None:
        if not stamps.any():
            return
        block, agent, at = (stamps >> 40) - 1, stamps >> 32 & 255, stamps & 0xFFFFFFFF
        here = block == self.block
        bad = here & (clocks.known.take(agents[:, None] * clocks.agents + np.where(here, agent, 0)) < at)
        elsewhere = (block >= 0) & ~here
        if elsewhere.any():
            for other in np.unique(block[elsewhere]):
                known = self.other_blocks.get(int(other))
                those = elsewhere & (block == other)
                bad |= those if known is None else those & (known[np.where(those, agent, 0)] < at)
        if bad.any():
            raise Race(what)
