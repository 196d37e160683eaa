"""What an installation holds."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from diffquant.export.native.build import LIBRARY

ROOT = Path(__file__).parents[1]
ROOMS = ("export", "calib", "bench")
SUFFIXES = (".py", ".cc", ".h", ".j2", ".css", ".js", ".typed")
NOT_BUILT = shutil.ignore_patterns(".*", "results", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.dylib")

pytest.importorskip("setuptools", minversion="77")


def expected_files():
    """Paths in an installation, as the source tree has them: modules, data, templates, the native kernel's sources."""
    rooms = [(ROOT / room, Path("diffquant", room)) for room in ROOMS]
    for folder, installed in [(ROOT / "diffquant", Path("diffquant")), *rooms]:
        for file in folder.rglob("*"):
            path = file.relative_to(folder)
            is_installed = path.parts[0] == "data" or file.suffix in SUFFIXES
            if file.is_file() and is_installed and "__pycache__" not in path.parts:
                yield str(installed / path)


def run(code, *options, cwd, **environment):
    """What a fresh interpreter writes to stdout and stderr."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def built(kind, folder, tree, compiler):
    """The archive that setuptools makes of a source tree, and its stderr; `kind` is sdist, wheel or editable."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    out, err = run(code, cwd=tree, CXX=str(compiler))
    return folder / out.splitlines()[-1], err


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree, so that building leaves nothing behind in it."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", symlinks=True, ignore=NOT_BUILT)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A stand-in for a C++ compiler: each file it is asked for is empty."""
    script = tmp_path_factory.mktemp("bin") / "c++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def wheel(tree, compiler, tmp_path_factory):
    """Names of the files in a wheel that was built from a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    archive, _ = built("sdist", folder, tree, compiler)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    file, _ = built("wheel", folder, folder / archive.name.removesuffix(".tar.gz"), compiler)
    return zipfile.ZipFile(file).namelist()


def test_a_wheel_of_a_source_distribution_holds_every_module_the_data_and_the_kernel(wheel):
    assert {*expected_files(), f"diffquant/export/native/{LIBRARY}"} - set(wheel) == set()


def test_a_wheel_holds_the_package_alone(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"diffquant"}
    assert not [name for name in wheel if "/results/" in name or "/tests/" in name]


def test_a_wheel_is_built_without_the_kernel_where_the_compiler_fails(tree, tmp_path):
    file, err = built("wheel", tmp_path, tree, sys.executable)
    assert "the native kernel is left out" in err
    assert set(expected_files()) - set(zipfile.ZipFile(file).namelist()) == set()


def test_an_editable_installation_finds_the_rooms_in_the_source_tree(tree, compiler, tmp_path):
    file, _ = built("editable", tmp_path, tree, compiler)
    zipfile.ZipFile(file).extractall(tmp_path / "site")
    code = f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
from importlib.util import find_spec
print(*(find_spec(f"diffquant.{{room}}").origin for room in {ROOMS}), sep="\\n")
"""
    # Isolated and without its own site-packages the interpreter knows this installation alone.
    out, _ = run(code, "-I", "-S", cwd=tmp_path)
    assert out.split() == [str(tree / f"diffquant/{room}/__init__.py") for room in ROOMS]
