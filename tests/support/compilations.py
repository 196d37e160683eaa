"""A pytest plugin that counts the kernels Triton compiled in a run, its workers' included, and how long that took.

Compiling is most of what the tests on a GPU take: `-p tests.support.compilations` says whether it has grown.
"""

from typing import Any

import pytest

_KEY = "compilations"


class Compilations:
    """Kernels that were compiled, and not found in Triton's cache.

    Attributes:
        count: number of kernels.
        seconds: seconds that they took, added up over all workers.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def listen(self) -> None:
        """Count what this process compiles from now on."""
        import triton

        triton.knobs.compilation.listener = self._compiled

    def _compiled(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            self.count += 1
            self.seconds += times.total / 1e6

    def add(self, count: int, seconds: float) -> None:
        """Count what another process compiled."""
        self.count += count
        self.seconds += seconds


_here = Compilations()


def pytest_configure() -> None:
    _here.listen()


def pytest_sessionfinish(session: pytest.Session) -> None:
    sent = getattr(session.config, "workeroutput", None)
    if sent is not None:
        sent[_KEY] = (_here.count, _here.seconds)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _here.add(*getattr(node, "workeroutput", {}).get(_KEY, (0, 0.0)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{_here.count} kernels were compiled in {_here.seconds:.0f} s of all workers")
