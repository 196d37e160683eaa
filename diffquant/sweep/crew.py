"""A crew of workers, each a process of its own somewhere, and who watches them until every cell is settled."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from diffquant.errors import DiffQuantError
from diffquant.support.progress import Progress
from diffquant.sweep.claims import latest_claims
from diffquant.sweep.work import Missing, Work

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_LEAVE = 5.0
# Workers that die one after the other without having claimed a cell would go on to.
_MOST_IDLE_DEATHS = 3

_logger = logging.getLogger(__name__)

# "left": it found nothing more to do; "failed": it said why on stderr; "died": it was killed, or its machine was lost.
End = Literal["left", "failed", "died"]


class Member(Protocol):
    """A worker that was started.

    Attributes:
        name: what people can find it by, such as "process 123".
    """

    name: str

    def end(self) -> End | None:
        """How it ended; None while it works."""

    def stop(self) -> None:
        """End it as Ctrl-C does, and wait until it has ended."""


@dataclass
class Crew:
    """Workers of a sweep.

    One that died is replaced, so its cell is tried again; one that failed by an error of its own would fail again.

    Attributes:
        size: most workers at a time.
        start: function that starts the worker of a place, counted from 0.
    """

    work: Work
    size: int
    start: Callable[[int], Member]
    _members: dict[int, Member] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    _idle_deaths: int = 0
    _state_at_death: tuple[int, int] | None = None

    def run(self, progress: Progress) -> None:
        """Keep workers at work until every cell is settled.

        Raises:
            DiffQuantError: the folder of the cells is gone, or no worker stays alive.
        """
        missing = Missing(self.work)
        total = len(missing.jobs)
        places = range(min(self.size, total))
        try:
            while True:
                names = missing.look()
                left = len(missing.jobs)
                progress(total - left, total, f"{len(places)} workers")
                if not left:
                    self._see_them_off()
                    return
                self._take_leave((left, sum(latest_claims(names).values())))
                for place in places:
                    if place not in self._members and place not in self._closed:
                        self._members[place] = self.start(place)
                if len(self._closed) == len(places):
                    raise DiffQuantError("every worker failed; what went wrong stands above")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            for member in self._members.values():
                member.stop()

    def _see_them_off(self) -> None:
        """Wait a little, since workers end by themselves when nothing is left."""
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while time.monotonic() < deadline and any(member.end() is None for member in self._members.values()):
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _take_leave(self, state: tuple[int, int]) -> None:
        """Let go of workers that ended.

        Args:
            state: numbers that a worker changes by what it does.
        """
        for place, member in list(self._members.items()):
            end = member.end()
            if end is None:
                continue
            del self._members[place]
            if end == "failed":
                self._closed.add(place)
            if end == "died":
                self._idle_deaths = self._idle_deaths + 1 if state == self._state_at_death else 0
                self._state_at_death = state
                _logger.warning("the worker in %s died; another takes its place", member.name)
            if self._idle_deaths == _MOST_IDLE_DEATHS:
                raise DiffQuantError("workers die before they measure anything; is there memory for as many?")
