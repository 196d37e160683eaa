"""Where the library is looked for, and how it is built."""

import os
import subprocess
import sys

import pytest

from diffquant.errors import UsageError
from diffquant.onnx.native import attention_instruction_set, library_path
from diffquant.onnx.native.build import LIBRARY


def build(*arguments, **environment):
    command = [sys.executable, "-m", "diffquant.onnx.native", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_an_override_names_another_library_or_none(monkeypatch, tmp_path):
    other = tmp_path / "other.so"
    other.touch()
    monkeypatch.setenv("DIFFQUANT_NATIVE_LIBRARY", str(other))
    assert library_path() == other
    monkeypatch.setenv("DIFFQUANT_NATIVE_LIBRARY", "")
    assert library_path() is None
    assert attention_instruction_set() is None
    monkeypatch.setenv("DIFFQUANT_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(UsageError, match=r"none\.so, which is not a file"):
        library_path()


def test_without_a_compiler_the_build_says_what_to_install(tmp_path):
    ran = build("-o", tmp_path / LIBRARY, PATH=str(tmp_path))
    assert ran.returncode == 5
    assert "no C++ compiler found; install g++ or clang++" in ran.stderr


def test_a_failed_build_leaves_nothing(tmp_path):
    ran = build("-o", tmp_path / LIBRARY, CXX="false")
    assert ran.returncode == 1
    assert "false did not build" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_compiler_from_before_a_processor_builds_the_kernels_that_it_knows(tmp_path):
    older = tmp_path / "g++-10"
    older.write_text('#!/bin/sh\ncase "$*" in *-mamx*) exit 1 ;; esac\nexec c++ "$@" -O0\n')
    older.chmod(0o755)
    library = tmp_path / LIBRARY
    ran = build("-o", library, CXX=str(older))
    assert ran.returncode == 0, ran.stderr
    loaded = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    subprocess.run([sys.executable, "-c", loaded, library], check=True)
    assert b"amx" not in library.read_bytes()
