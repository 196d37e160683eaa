"""What `make test` leaves to `make test-all`: tests that take long (tests/slow.py), and cases for which others stand.

Of a parametrized test it runs cases that have every value of every parameter once; other combinations are thorough.

Continuous integration runs a twelfth of them a day, so that in twelve days it has run them all. Hooks of pytest choose
it where DIFFQUANT_SHARE is set: to a number from 0 to 11, or to "today".
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.slow import slow_tests

VARIABLE = "DIFFQUANT_SHARE"
SHARES = 12

thorough = pytest.mark.thorough
_COMBINATION = thorough(reason="a combination of values")
_SLOW = thorough(reason="one of tests/slow.txt")


def sampled(cases: Iterable[Any], each: int) -> list[Any]:
    """Cases for `parametrize`, of which `make test` runs the first, and one in `each` from there on."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough if number % each else ())
        for number, case in enumerate(cases)
    ]


def pick_each_choice(cases: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Pick cases of one test that have every value of every parameter at least once, first cases first."""
    values = {case: _values(case) for case in cases}
    missing = {value for of_case in values.values() for value in of_case}
    picked = {cases[0]}
    missing -= values[cases[0]]
    while missing:
        best = max(cases, key=lambda case: len(missing & values[case]))
        picked.add(best)
        missing -= values[best]
    return picked


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    return {(name, repr(value)) for name, value in parameters.items()}


def leave_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as thorough the cases whose values `make test` tries in other cases of the same test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        # Where it was called before, it marks the same cases again.
        if item.get_closest_marker(thorough.name) in (None, _COMBINATION.mark):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        for case in set(cases) - pick_each_choice(cases):
            case.add_marker(_COMBINATION)


def leave_slow_tests(items: Iterable[pytest.Item]) -> None:
    """Mark as thorough the tests that tests/slow.txt lists."""
    slow = slow_tests()
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(_SLOW)


def share_of_today() -> int:
    """The number of today's share, by the days since 1970 in universal time."""
    return int(time.time() // 86400) % SHARES


def share_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, int]:
    """The share of every thorough test, whatever day it is.

    A test's cases, which take about equally long, follow each other from a share on that its name determines. So a
    new test moves none of the others, and a new case none before it.

    Args:
        items: tests as they were collected, before any are deselected.
    """
    shares, seen = {}, Counter[str]()
    for item in items:
        if item.get_closest_marker(thorough.name):
            name = item.nodeid.partition("[")[0]
            first = int(hashlib.sha256(name.encode()).hexdigest(), 16)
            shares[item] = (first + seen[name]) % SHARES
            seen[name] += 1
    return shares


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say which share it is; processes of xdist, which may start after midnight, take it from the first one."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None or hasattr(session.config, "workerinput"):
        return
    if chosen == "today":
        chosen = os.environ[VARIABLE] = str(share_of_today())
    if chosen not in map(str, range(SHARES)):
        raise pytest.UsageError(f"{VARIABLE} must be today or a number from 0 to {SHARES - 1}, got {chosen}")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter:
        reporter.write_line(f"thorough tests of share {chosen}; {VARIABLE}={chosen} runs the same on another day")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave combinations of values and slow tests to the thorough ones, and out the thorough ones of other shares."""
    leave_combinations(items)
    leave_slow_tests(items)
    if VARIABLE in os.environ:
        shares, chosen = share_of(items), int(os.environ[VARIABLE])
        others = [item for item in items if shares.get(item, chosen) != chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if shares.get(item, chosen) == chosen]
