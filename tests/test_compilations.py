"""The count of what Triton compiles in a test run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
TEST = """
import torch
import triton
import triton.language as tl
from tests.support.absent_device import install


@triton.jit
def double(x, VALUE: tl.constexpr):
    tl.store(x, tl.load(x) * VALUE)


def test_it():
    install()
    for value in (2, 3, 3):
        double[(1,)](torch.ones(1), VALUE=value)
"""


@thorough
def test_kernels_are_counted_once_each_in_workers_too(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.compilations", "-p", "xdist", "--noconftest"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run([*command, "-n", "1", "."], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "2 kernels were compiled in" in found.stdout
