"""Starts workers and replaces those that die, until every cell is measured or has failed."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from diffquant.errors import DiffQuantError
from diffquant.support.progress import Progress
from diffquant.sweep.claims import latest_claims
from diffquant.sweep.work import Work

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_LEAVE = 5.0
# Give up when this many workers in a row die before they claim a cell.
_MOST_IDLE_DEATHS = 3

_logger = logging.getLogger(__name__)

# "left": nothing was left to do; "failed": its error is on stderr; "died": it was killed, or its machine was lost.
End = Literal["left", "failed", "died"]


@dataclass(frozen=True)
class Member:
    """A running worker.

    Attributes:
        name: name by which to find it, such as "process 123".
        end: returns how it ended, or None while it works.
        stop: interrupts it as Ctrl-C does, and waits until it has ended.
    """

    name: str
    end: Callable[[], End | None]
    stop: Callable[[], None]


def keep_at_work(work: Work, size: int, start: Callable[[int], Member], progress: Progress) -> None:
    """Keep up to `size` workers running until every cell is measured or has failed.

    A worker that died is replaced, so its cell is tried again; one that ended with an error is not, since it would fail
    again.

    Args:
        size: largest number of workers at a time.
        start: starts the worker with a given index, counted from 0.

    Raises:
        DiffQuantError: the folder of the cells is gone, or no worker stays alive.
    """
    total = len(work.left)
    open_places = set(range(min(size, total)))
    members: dict[int, Member] = {}
    idle_deaths, state_at_death = 0, None
    try:
        while True:
            # Changes whenever some process claims or finishes a cell. The first claim of a cell has number 0.
            state = sum(number + 1 for number in latest_claims(work.look()).values()), len(work.left)
            progress(total - len(work.left), total, f"{min(size, total)} workers")
            if not work.left:
                _wait_for(members)
                return
            for place, end in [(place, member.end()) for place, member in members.items()]:
                if end == "failed":
                    open_places.remove(place)
                elif end == "died":
                    _logger.warning("the worker in %s died; another takes its place", members[place].name)
                    idle_deaths = idle_deaths + 1 if state == state_at_death else 0
                    state_at_death = state
                if end is not None:
                    del members[place]
                if idle_deaths == _MOST_IDLE_DEATHS:
                    raise DiffQuantError("workers die before they measure anything; is there memory for as many?")
            if not open_places:
                raise DiffQuantError("every worker failed; their errors are above")
            for place in sorted(open_places - members.keys()):
                members[place] = start(place)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        for member in members.values():
            member.stop()


def _wait_for(members: dict[int, Member]) -> None:
    """Wait a little: workers end by themselves when nothing is left."""
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while time.monotonic() < deadline and any(member.end() is None for member in members.values()):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
