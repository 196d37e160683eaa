"""Hooks of pytest by which a run fails where a test is skipped that must not be, if DIFFQUANT_COMPLETE is set.

Without it a kernel that was not built, or a package that is missing, would pass continuous integration unseen.
"""

import os
import re

import pytest

VARIABLE = "DIFFQUANT_COMPLETE"
# What the machine of continuous integration has no device for, what an extra or a target of its own installs, and data
# that do not ship.
_EXPECTED = re.compile(
    "needs a CUDA device|compiling does not depend on the device|this processor has no|needs the extra quantizers"
    "|its data do not ship|needs Triton 3.6.0 beside the other|what make test-all ONLY="
    "|make test-all ONLY=(ptx|webgpu)"
)


def is_complete() -> bool:
    """Whether this run must have all that tests need."""
    return VARIABLE in os.environ


def pytest_sessionfinish(session: pytest.Session) -> None:
    if is_complete() and _unexpected_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unexpected = _unexpected_skips(config)
    if is_complete() and unexpected:
        terminalreporter.section(f"skipped, though {VARIABLE} says that nothing is missing")
        terminalreporter.write_line("\n".join(unexpected))


def _unexpected_skips(config: pytest.Config) -> list[str]:
    """Reasons for skips that nothing excuses; none in a worker of xdist, which reports to the process behind it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    reasons = {str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr) for report in reports}
    return sorted(reason for reason in reasons if not _EXPECTED.search(reason))
