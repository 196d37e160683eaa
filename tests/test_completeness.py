"""Continuous integration fails where a test was skipped that it has all it needs for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def status_of(tmp_path, reason, environment, workers):
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_it():\n    pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.completeness", "-p", "xdist", "--noconftest"]
    kept = {name: value for name, value in os.environ.items() if name != "DIFFQUANT_COMPLETE"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run(
        [*command, "-n", workers, "."], cwd=tmp_path, env=kept | environment, capture_output=True, text=True
    )
    return found.returncode, found.stdout


def test_a_skip_for_want_of_a_package_fails_a_complete_run(tmp_path):
    status, said = status_of(tmp_path, "could not import 'triton'", {"DIFFQUANT_COMPLETE": "1"}, "1")
    assert status == 1
    assert "could not import 'triton'" in said


def test_a_skip_for_want_of_a_gpu_passes(tmp_path):
    assert status_of(tmp_path, "needs a CUDA device", {"DIFFQUANT_COMPLETE": "1"}, "0")[0] == 0


def test_continuous_integration_sets_the_variable():
    program = (ROOT / ".ci" / "run").read_text()
    assert program.index("export DIFFQUANT_COMPLETE=1\n") < program.index("part make test\n")
