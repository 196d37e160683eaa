"""mypy sees through the links to the rooms at the top of the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
UNCHECKED = shutil.ignore_patterns(".[!m]*", "data", "results", "__pycache__", "*.so")
FAULTS = """
from diffquant.onnx import export, no_such_name

export(1, 2, 3, nonsense="x")
"""
# A room of the same name is imported too, which must not hide the verb.
VERBS = """
import diffquant
import diffquant.onnx.options
import diffquant.measure.sweep.run

diffquant.quantize("model", "out", "4:g32", rounding="gptq")
diffquant.load("out", {"kv": 8}, dtype="bfloat16")
diffquant.sweep(["model"], "out", bits=[8, 4], limit=100)
diffquant.sweep(1, "out")
diffquant.export("model", "out", no_such_option=1)
diffquant.no_such_verb
"""
# Following the large libraries takes mypy a minute, and the faults are between modules of our own.
OTHERS = """
[[tool.mypy.overrides]]
module = ["torch.*", "numpy.*", "onnx.*", "onnxruntime.*", "scipy.*"]
follow_imports = "skip"
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for room in ("diffquant", "export", "calib", "bench"):
        shutil.copytree(ROOT / room, folder / room, symlinks=True, ignore=UNCHECKED)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + OTHERS)
    return folder


def reports(tree, code):
    """What mypy says of some code in the command line's room."""
    (tree / "diffquant/verbs/cli/planted.py").write_text(code)
    # What the rooms import need not be free of faults here, only known.
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "diffquant/verbs/cli/planted.py"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@thorough
def test_mypy_reports_a_wrong_call_from_the_command_line_into_a_room(tree):
    said = reports(tree, FAULTS)
    assert 'Module "diffquant.onnx" has no attribute "no_such_name"' in said
    assert 'Unexpected keyword argument "nonsense" for "export"' in said


@thorough
def test_mypy_knows_the_verbs_of_the_package(tree):
    said = reports(tree, VERBS)
    assert 'Argument 1 to "sweep" has incompatible type "int"' in said
    assert 'Unexpected keyword argument "no_such_option" for "export"' in said
    assert 'Module has no attribute "no_such_verb"' in said
    assert "Found 3 errors" in said
