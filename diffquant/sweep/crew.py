"""A crew of workers, each a process of its own somewhere, and who watches them until every cell is settled."""

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
# Workers that die one after the other without having claimed a cell would go on to.
_MOST_IDLE_DEATHS = 3

_logger = logging.getLogger(__name__)

# "left": it found nothing more to do; "failed": it said why on stderr; "died": it was killed, or its machine was lost.
End = Literal["left", "failed", "died"]


@dataclass(frozen=True)
class Member:
    """A worker that was started.

    Attributes:
        name: what people can find it by, such as "process 123".
        end: function that tells how it ended; None while it works.
        stop: function that ends it as Ctrl-C does, and waits until it has ended.
    """

    name: str
    end: Callable[[], End | None]
    stop: Callable[[], None]


def keep_at_work(work: Work, size: int, start: Callable[[int], Member], progress: Progress) -> None:
    """Keep workers at work until every cell is settled.

    One that died is replaced, so its cell is tried again; one that failed by an error of its own would fail again.

    Args:
        size: most workers at a time.
        start: function that starts the worker of a place, counted from 0.

    Raises:
        DiffQuantError: the folder of the cells is gone, or no worker stays alive.
    """
    total = len(work.left)
    open_places = set(range(min(size, total)))
    members: dict[int, Member] = {}
    idle_deaths, state_at_death = 0, None
    try:
        while True:
            # Whoever claims or settles a cell changes this.
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
                raise DiffQuantError("every worker failed; what went wrong stands above")
            for place in sorted(open_places - members.keys()):
                members[place] = start(place)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        for member in members.values():
            member.stop()


def _wait_for(members: dict[int, Member]) -> None:
    """Wait a little, since workers end by themselves when nothing is left."""
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while time.monotonic() < deadline and any(member.end() is None for member in members.values()):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
