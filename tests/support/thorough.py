"""What `make test` leaves to `make test-thorough`: tests that take long, and cases for which a few others stand.

Continuous integration runs an eighth of them a day, so that in eight days it has run them all. Hooks of pytest choose
it where DIFFQUANT_EIGHTH is set: to a number from 0 to 7, or to "today".
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "DIFFQUANT_EIGHTH"
EIGHTHS = 8

thorough = pytest.mark.thorough


def sampled(cases: Iterable[Any], each: int) -> list[Any]:
    """Cases for `parametrize`, of which `make test` runs the first, and one in `each` from there on."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough if number % each else ())
        for number, case in enumerate(cases)
    ]


def eighth_of_today() -> int:
    """The number of today's eighth, by the days since 1970 in universal time."""
    return int(time.time() // 86400) % EIGHTHS


def eighth_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, int]:
    """The eighth of every thorough test, whatever day it is.

    A test's cases, which take about equally long, follow each other from an eighth on that its name determines. So a
    new test moves none of the others, and a new case none before it.

    Args:
        items: tests as they were collected, before any are deselected.
    """
    eighths, seen = {}, Counter[str]()
    for item in items:
        if item.get_closest_marker(thorough.name):
            name = item.nodeid.partition("[")[0]
            first = int(hashlib.sha256(name.encode()).hexdigest(), 16)
            eighths[item] = (first + seen[name]) % EIGHTHS
            seen[name] += 1
    return eighths


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say which eighth it is; processes of xdist, which may start after midnight, take it from the first one."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None or hasattr(session.config, "workerinput"):
        return
    if chosen == "today":
        chosen = os.environ[VARIABLE] = str(eighth_of_today())
    if chosen not in map(str, range(EIGHTHS)):
        raise pytest.UsageError(f"{VARIABLE} must be today or a number from 0 to {EIGHTHS - 1}, got {chosen}")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter:
        reporter.write_line(f"thorough tests of eighth {chosen}; {VARIABLE}={chosen} runs the same on another day")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the thorough tests of other eighths."""
    if VARIABLE in os.environ:
        eighths, chosen = eighth_of(items), int(os.environ[VARIABLE])
        others = [item for item in items if eighths.get(item, chosen) != chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if eighths.get(item, chosen) == chosen]
