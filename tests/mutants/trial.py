"""The trial of a fault: a process of its own imports the changed module and runs the tests that reach it."""

import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import CodeType

import pytest
from hypothesis import Phase, settings

from tests.mutants.planting import Mutant, planted

# A fault may leave a thread waiting for ever, which takes no processor time.
_PATIENCE = 20
SURVIVED, KILLED, TIMED_OUT = "survived", "killed", "timed out"


def in_a_process(work: Callable[[], int], limit: float) -> int | None:
    """Exit status of some work in a forked process that says nothing; None where it took longer than the limit.

    Args:
        limit: seconds of processor time; of waiting it may take more, since other work may take the processor.
    """
    process = os.fork()
    if not process:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    deadline = time.monotonic() + _PATIENCE * limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def outcome(mutant: Mutant, tests: Sequence[str], limit: float) -> str:
    """What tests say about a fault: an outcome by name; a fault that no test reaches survives.

    Raises:
        ValueError: the module has been imported, so that tests would meet it as it was.
    """
    if not tests:
        return SURVIVED
    if mutant.module in sys.modules:
        raise ValueError(f"{mutant.module} was imported before a fault was planted in it; import it later")

    def run() -> int:
        sys.meta_path.insert(0, _Finder(mutant))
        return status_of(tests)

    status = in_a_process(run, limit)
    if status is None:
        return TIMED_OUT
    return SURVIVED if status == 0 else KILLED


def status_of(tests: Sequence[str]) -> int:
    """Exit status of pytest, which ends at the first failure."""
    # Looking for a smaller example takes minutes.
    settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    options = [
        "-x",
        "-m",
        "",
        "--hypothesis-profile=mutants",
        "-q",
        "--durations=0",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
    ]
    return int(pytest.main([*options, *tests]))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, the changed one."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        file = os.path.abspath(self._mutant.file)
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file, self._mutant))


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the changed tree, whatever bytecode lies in the cache."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, _name: str) -> CodeType:
        return compile(planted(self._mutant), self.path, "exec")
