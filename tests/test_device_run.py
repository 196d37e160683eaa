"""What is kept of a test run on a device, and that a device which is lost ends one worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
import torch


def test_it_passes():
    pass


def test_it_is_skipped():
    pytest.skip("not here")


def test_the_device_is_lost():
    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    # Not given back: the process has lost it for good.
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    assert False


def test_a_later_one_passes():
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize(("workers", "later"), [("1", "passed"), ("0", "failed")])
def test_a_lost_device_ends_a_worker_and_the_file_says_what_each_test_did(tmp_path, workers, later):
    (tmp_path / "test_some.py").write_text(TESTS)
    results = tmp_path / "results.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DIFFQUANT_GPU_RESULTS": str(results)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.support.device_run", "test_some.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    written = json.loads(results.read_text())
    outcomes = {test.partition("::")[2]: kept["outcome"] for test, kept in written["tests"].items()}
    assert outcomes == {
        "test_it_passes": "passed",
        "test_it_is_skipped": "skipped",
        "test_the_device_is_lost": "failed",
        "test_a_later_one_passes": later,
    }
    assert "versions" in written["environment"]
