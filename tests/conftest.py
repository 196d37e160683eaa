"""One torch thread a test process: tests run side by side, and tiny tensors gain nothing from more."""

import gc
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

from diffquant.verbs.cli import main
from tests.support.completeness import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401
from tests.support.interpreting import without_waste
from tests.support.thorough import pytest_collection_modifyitems, pytest_sessionstart  # noqa: F401

torch.set_num_threads(1)
# Triton reads this where a kernel is declared: without a GPU kernels run interpreted, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A busy machine is no failure, and CI tries the same examples every time.
settings.register_profile("diffquant", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("diffquant")


@pytest.fixture(autouse=True, scope="session")
def _no_waste_in_the_interpreter():
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        without_waste()


@pytest.fixture(autouse=True)
def _no_device_unless_named(monkeypatch):
    monkeypatch.setattr("diffquant.support.devices._fastest_device", lambda: "cpu")


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage():
    """What was imported so far is millions of objects, which each collection of garbage would go through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["diffquant", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        return stop.value.code or 0, out.out, out.err

    return call


@pytest.fixture
def on_disk(monkeypatch):
    """Names of the parameters that were put on disk."""
    import accelerate.utils

    offload_weight, names = accelerate.utils.offload_weight, []

    def recording(weight, name, *rest):
        names.append(name)
        return offload_weight(weight, name, *rest)

    monkeypatch.setattr(accelerate.utils, "offload_weight", recording)
    return names


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and cases that are made now stay: looking for garbage among them took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()
