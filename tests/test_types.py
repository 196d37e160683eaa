"""mypy sees through the links to the rooms at the top of the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNCHECKED = shutil.ignore_patterns(".[!m]*", "data", "results", "__pycache__", "*.so")
FAULTS = """
from diffquant.export import export
from diffquant.calib.calibration import no_such_name

export(1, 2, 3, nonsense="x")
"""
# Following the large libraries takes mypy a minute, and the faults are between modules of our own.
OTHERS = """
[[tool.mypy.overrides]]
module = ["torch.*", "numpy.*", "onnx.*", "onnxruntime.*", "scipy.*"]
follow_imports = "skip"
"""


def test_mypy_reports_a_wrong_call_from_the_command_line_into_a_room(tmp_path):
    for folder in ("diffquant", "export", "calib", "bench"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=UNCHECKED)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + OTHERS)
    planted = tmp_path / "diffquant/cli/planted.py"
    planted.write_text(FAULTS)
    # What the rooms import need not be free of faults here, only known.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "diffquant/cli/planted.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'Module "diffquant.calib.calibration" has no attribute "no_such_name"' in done.stdout
    assert 'Unexpected keyword argument "nonsense" for "export"' in done.stdout
