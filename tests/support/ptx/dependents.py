"""Programmatic launches by a model of their order: a dependent kernel begins while those before it may still run.

Until a warp of it has passed `griddepcontrol.wait`, nothing that the kernels before it stored is known to be there, and
nothing that they load may be overwritten. They may let it begin (`launch_dependents`) at once: when is not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.ptx.races import Bools, Ints, Race


@dataclass(frozen=True)
class Reached:
    """What a launch loaded and stored of a tensor's storage, by units of so many bytes from its address on.

    Attributes:
        held: keeps the storage, so that no other tensor takes its place.
    """

    address: int
    unit: int
    loaded: Bools
    stored: Bools
    held: Any

    def touched(self, addresses: Ints, nbytes: int, *, stores: bool) -> bool:
        """Whether accesses of so many bytes conflict with what the launch does."""
        units = (addresses[:, None] - self.address) // self.unit + np.arange(max(nbytes // self.unit, 1))
        units = units[(units >= 0) & (units < len(self.stored))]
        return bool(self.stored[units].any() or (stores and self.loaded[units].any()))


class Dependence:
    """What the kernels before a dependent launch reach, and which warps of a block have waited for their end."""

    def __init__(self, before: Sequence[Reached]) -> None:
        self.before = before
        self.waited: set[int] = set()

    def begin(self) -> None:
        """The next block runs, which has waited for nothing."""
        self.waited.clear()

    def check(self, agents: Ints, addresses: Ints, nbytes: int, text: str, *, stores: bool) -> None:
        """Refuse what warps do too early.

        Raises:
            Race: it conflicts with what a kernel before does.
        """
        if not self.before:
            return
        early = addresses[~np.isin(agents, list(self.waited))].astype(np.int64)
        if len(early) and any(each.touched(early, nbytes, stores=stores) for each in self.before):
            raise Race(f"a tensor is reached beside the launch before, without griddepcontrol.wait: {text}")
