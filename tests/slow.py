"""Measure every test's CPU seconds and list those that `make test` leaves to `make test-all`: `python -m tests.slow`.

It runs the whole quick suite with the listed tests, and writes tests/slow.txt: tests one of whose cases takes more than
`LIMIT` CPU seconds, child processes included. CI runs a twelfth of them each day, as it does the other thorough tests.
"""

import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT = 2.0
LIST = Path(__file__).with_name("slow.txt")
VARIABLE = "DIFFQUANT_CPU_SECONDS"
# What stays in `make test` however long it takes: each verb from end to end, the pages, and kills.
KEPT = (
    "tests/golden/",
    "tests/docs/",
    "tests/test_completeness.py",
    "tests/test_counts.py",
    "tests/test_english.py",
    "tests/export/test_running.py::test_the_command_line_exports_verifies_and_runs",
    "tests/export/test_planted_faults.py::test_a_planted_fault_is_refused",
    "tests/fuzz/test_kills.py",
    "tests/measure/test_run.py",
)
_seconds: dict[str, float] = {}


def slow_tests() -> frozenset[str]:
    """Return the listed tests, each as FILE::NAME without its parameters."""
    return frozenset() if os.environ.get(VARIABLE) else frozenset(LIST.read_text(encoding="utf-8").split())


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid] = _cpu() - before


def pytest_sessionfinish() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    lines = (f"{seconds:.2f}\t{name}\n" for name, seconds in _seconds.items())
    Path(os.environ[VARIABLE], f"{worker}.txt").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Run the suite with this plugin and write the list."""
    folder = LIST.parents[1] / "build" / "cpu-seconds"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[VARIABLE] = str(folder)
    status = pytest.main(["-p", "tests.slow", "-n", "2", "--dist", "worksteal", *sys.argv[1:]])
    longest: defaultdict[str, float] = defaultdict(float)
    for line in (line for file in folder.glob("*.txt") for line in file.read_text(encoding="utf-8").splitlines()):
        seconds, _, name = line.partition("\t")
        test = name.partition("[")[0]
        longest[test] = max(longest[test], float(seconds))
    slow = sorted(name for name, seconds in longest.items() if seconds > LIMIT and not name.startswith(KEPT))
    LIST.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")
    print(f"{len(slow)} tests in {LIST}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
