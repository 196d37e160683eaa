"""Which tests reach which lines, how long each takes, and which packages they need: one run of a group's tests."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
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


class _Watcher:
    """A plugin of pytest that tells coverage which test runs."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        started = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - started
        self.measured.switch_context("")


def measure(files: list[str], tests: tuple[str, ...], result: Path) -> int:
    """Run tests and write their `Reach` to a file; the exit status of pytest."""
    digest = _digest(files, tests)
    measured = coverage.Coverage(data_file=None, include=[os.path.abspath(file) for file in files])
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
        for line, contexts in data.contexts_by_lineno(os.path.abspath(file)).items():
            # What runs when a module is imported belongs to no test, so each of them may notice it.
            for test in reached if contexts == [""] else filter(None, contexts):
                reached[test].setdefault(file, []).append(line)
    packages = [name for name in sys.modules if name not in before and not name.startswith(_OURS)]
    result.write_text(json.dumps(asdict(Reach(reached, watcher.seconds, packages, digest))))
    return int(status)


def _digest(files: list[str], tests: tuple[str, ...]) -> str:
    test_files = [file for test in tests for file in (sorted(Path(test).rglob("*.py")) or [Path(test)])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in (*map(Path, files), *test_files))).hexdigest()


def _range(lines: tuple[int, int]) -> range:
    return range(lines[0], lines[1] + 1)
