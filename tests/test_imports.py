"""Imports run one way, from the command line down to errors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# fmt: off
ORDER = [
    "errors", "support", "data", "scheme", "numerics", "family", "report", "kernels", "attention", "formats", "model",
    "text", "source", "quantization", "loading", "conversion", "inspection", "generation", "evals", "doctor", "sweep",
    "demo", "cli",
]
# fmt: on
ROOMS = {"export", "calib", "bench"}


def imported(file):
    """(module, whether at module level) of each diffquant import in a file."""
    tree = ast.parse(file.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diffquant."):
            yield node.module.split(".")[1], id(node) in top
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("diffquant."):
                    yield alias.name.split(".")[1], id(node) in top


@pytest.mark.parametrize("file", sorted((ROOT / "diffquant").rglob("*.py")), ids=lambda f: str(f.relative_to(ROOT)))
def test_the_core_imports_downwards_only(file):
    room = file.relative_to(ROOT / "diffquant").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    for module, at_top in imported(file):
        if module in ROOMS:
            assert room in ("cli", "demo"), f"{file} imports the room {module}"
            assert not at_top, f"{file} imports the room {module} before it is asked for"
        else:
            assert ORDER.index(module) <= ORDER.index(room), f"{file} imports {module}"


@pytest.mark.parametrize("room", ["export", "calib"])
def test_a_room_imports_no_other_room(room):
    for file in (ROOT / room).rglob("*.py"):
        assert not {module for module, _ in imported(file)} & (ROOMS - {room}), file


def modules_after(code):
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return set(out.stdout.split())


def test_help_does_not_import_torch():
    code = """
import sys
sys.argv = ["diffquant", "--help"]
from diffquant.cli import main
try:
    main()
except SystemExit:
    pass
"""
    assert not modules_after(code) & {"torch", "transformers", "numpy", "matplotlib", "yaml"}


def test_attention_needs_torch_and_numpy_alone():
    assert not modules_after("import diffquant.attention") & {
        "transformers",
        "typer",
        "yaml",
        "matplotlib",
        "safetensors",
    }
