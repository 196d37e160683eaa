"""What an installation holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_build_holds_every_module_and_the_data_also_where_the_compiler_fails(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    arguments = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    done = subprocess.run(
        [sys.executable, "setup.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"CXX": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the native kernel is left out" in done.stderr
    built = tmp_path / "lib" / "diffquant"
    rooms = {"export", "calib", "bench"}
    sources = [Path("py.typed"), *(file.relative_to(ROOT / "diffquant") for file in (ROOT / "diffquant").rglob("*.py"))]
    sources += [file.relative_to(ROOT) for room in rooms for file in (ROOT / room).rglob("*.py")]
    data = [file.relative_to(ROOT / "diffquant") for file in (ROOT / "diffquant" / "data").rglob("*") if file.is_file()]
    data += [Path("report", "template.html.j2")]
    missing = [
        str(file) for file in (*sources, *data) if "__pycache__" not in file.parts and not (built / file).is_file()
    ]
    assert not missing
