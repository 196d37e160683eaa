"""A pytest plugin for tests on a CUDA device: one fault is one test's, and a file says what each of them did.

An illegal access lasts as long as its process: every later test of it would fail as well. A worker of pytest-xdist
ends there, and another goes on. DIFFQUANT_GPU_RESULTS may name a JSON file, for the device and each test's outcome
and seconds, compiling included; it is written as tests end, so that a run that is cut off leaves what it has.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.files import write_json

RESULTS = "DIFFQUANT_GPU_RESULTS"
_EVERY = 20

_tests: dict[str, dict[str, Any]] = {}


def lost() -> bool:
    """Whether this process can compute nothing more on its device."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized() and lost():
        print(f"{report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)
        os._exit(1)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test did; what workers report comes here, and that a worker ended in a test."""
    entry = _tests.setdefault(report.nodeid, {"outcome": report.outcome, "seconds": 0.0})
    entry["seconds"] = round(entry["seconds"] + report.duration, 2)
    if report.failed:
        entry |= {"outcome": "failed", "text": report.longreprtext[-3000:]}
    elif report.skipped and entry["outcome"] != "failed":
        entry["outcome"] = "skipped"
    if len(_tests) % _EVERY == 0:
        _write()


def pytest_sessionfinish() -> None:
    _write()


_environment = cache(describe_environment)


def _write() -> None:
    if (file := os.environ.get(RESULTS)) and "PYTEST_XDIST_WORKER" not in os.environ:
        write_json(Path(file), {"environment": _environment(), "tests": _tests})
