"""Which tests reach which lines, how long each takes, and which packages they need: one run of a group's tests."""

import ast
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage
import pytest

# Code of this repository is imported anew for each fault. All else is imported once, before the processes fork.
_OURS = ("diffquant", "tests", "research", "conftest", "test_")


@dataclass(frozen=True)
class Reach:
    """What a run of unchanged tests showed.

    Attributes:
        tests: lines reached by each test, by file.
        seconds: processor time of each test, its fixtures included: another load of the machine does not change it.
        packages: modules of other packages that were imported, in order.
        digest: digest of the files that are changed and of the tests.
    """

    tests: dict[str, dict[str, list[int]]]
    seconds: dict[str, float]
    packages: list[str]
    digest: str

    def is_of(self, files: list[str], tests: tuple[str, ...]) -> bool:
        """Whether these files and tests are still what they were."""
        return self.digest == _digest(files, tests)

    def seconds_of(self, tests: list[str]) -> float:
        """Processor time of some tests."""
        return sum(self.seconds[test] for test in tests)

    def of(self, file: str, lines: tuple[int, int], budget: float) -> list[str]:
        """Tests that reach some lines of a file, one of each test function first and the quick ones first.

        Args:
            budget: seconds of tests after which no further one is taken.
        """
        reaching = [test for test, files in self.tests.items() if any(n in files.get(file, ()) for n in _range(lines))]
        functions: dict[str, list[str]] = {}
        for test in sorted(reaching, key=self.seconds.__getitem__):
            functions.setdefault(test.partition("[")[0], []).append(test)
        rank = {test: place for alike in functions.values() for place, test in enumerate(alike)}
        chosen: list[str] = []
        total = 0.0
        for test in sorted(reaching, key=lambda test: (rank[test], self.seconds[test])):
            total += self.seconds[test]
            if chosen and total > budget:
                break
            chosen.append(test)
        return chosen


@dataclass(frozen=True)
class Asked:
    """Tests that are named, whatever they reach.

    Attributes:
        names: files, or tests in them.
        packages: modules of other packages that they import, in order.
    """

    names: list[str]
    packages: list[str]

    def of(self, _file: str, _lines: tuple[int, int], _budget: float) -> list[str]:
        """All of them."""
        return self.names

    def seconds_of(self, tests: list[str]) -> float:
        """Seconds that tests may take, since how long they do is not known."""
        return 60.0 * len(tests)


class _Watcher:
    """A plugin of pytest that tells coverage which test runs, or which fixture is made that tests share.

    Attributes:
        seconds: processor time of each test.
        users: tests that have a shared fixture, by the context in which it is made.
    """

    def __init__(self, measured: coverage.Coverage) -> None:
        self.seconds: dict[str, float] = {}
        self.users: dict[str, list[str]] = {}
        self._measured = measured
        self._contexts = [""]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        fixtures = [each for name in item.fixturenames for each in item._fixtureinfo.name2fixturedefs.get(name, ())]
        for fixture in fixtures:
            self.users.setdefault(_made(fixture), []).append(item.nodeid)
        started = time.process_time()
        with self._context(item.nodeid):
            yield
        self.seconds[item.nodeid] = time.process_time() - started

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        with self._context(self._contexts[-1] if fixturedef.scope == "function" else _made(fixturedef)):
            return (yield)

    def tests_in(self, contexts: Iterable[str]) -> set[str]:
        """The tests that some contexts stand for."""
        return {test for context in filter(None, contexts) for test in self.users.get(context, [context])}

    @contextmanager
    def _context(self, name: str) -> Iterator[None]:
        self._contexts.append(name)
        self._measured.switch_context(name)
        yield
        self._contexts.pop()
        self._measured.switch_context(self._contexts[-1])


def _made(fixture: pytest.FixtureDef[object]) -> str:
    """The context in which a fixture is made."""
    return f"fixture {fixture.baseid}::{fixture.argname}"


def others_since(before: set[str]) -> list[str]:
    """Modules of other packages that were imported since there were these modules, in order."""
    return [name for name in sys.modules if name not in before and not name.startswith(_OURS)]


def measure(files: list[str], tests: tuple[str, ...], result: Path) -> int:
    """Run tests and write their `Reach` to a file; the exit status of pytest."""
    digest = _digest(files, tests)
    measured = coverage.Coverage(data_file=None, include=[os.path.realpath(file) for file in files])
    watcher = _Watcher(measured)
    before = set(sys.modules)
    measured.start()
    status = pytest.main(
        ["-q", "-m", "", "--durations=0", "-p", "no:cacheprovider", "-n", "0", *tests], plugins=[watcher]
    )
    measured.stop()
    data = measured.get_data()
    reached: dict[str, dict[str, list[int]]] = {test: {} for test in watcher.seconds}
    for file in files:
        contexts = data.contexts_by_lineno(os.path.realpath(file))
        tests_by_line = {line: watcher.tests_in(contexts[line]) for line in contexts}
        in_functions = _lines_in_functions(file)
        users = {test for line in in_functions for test in tests_by_line.get(line, ())}
        for line, tests_of_line in tests_by_line.items():
            # What runs when a module is imported belongs to no test: whichever uses the module may notice it.
            for test in sorted(tests_of_line if line in in_functions else users) or reached:
                reached[test].setdefault(file, []).append(line)
    result.write_text(json.dumps(asdict(Reach(reached, watcher.seconds, others_since(before), digest))))
    return int(status)


def _lines_in_functions(file: str) -> set[int]:
    """Lines of a file that run when a function of it is called, not when it is imported."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    bodies = [node.body for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for body in bodies for line in range(body[0].lineno, (body[-1].end_lineno or 0) + 1)}


def _digest(files: list[str], tests: tuple[str, ...]) -> str:
    places = [Path(test.partition("::")[0]) for test in tests]
    test_files = [file for place in places for file in (sorted(place.rglob("*.py")) or [place])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in (*map(Path, files), *test_files))).hexdigest()


def _range(lines: tuple[int, int]) -> range:
    return range(lines[0], lines[1] + 1)
