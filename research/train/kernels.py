"""The compiled kernels of `kernels.cc`: built once with a C++ compiler, when a training first asks for them."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.onnx.native.build import find_compiler
from diffquant.support.files import file_digest

SOURCE = Path(__file__).with_name("kernels.cc")
_HEADER = Path(__file__).with_name("vectors.h")
BUILD = SOURCE.parents[2] / "build" / "train"
_FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-Wno-psabi"]
_NATIVE = ["-march=x86-64-v4", "-mavx512bf16"]
_AVX2 = ["-march=x86-64-v3"]


class Layout(ctypes.Structure):
    """`Layout` of kernels.cc."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "length", "channels", "heads", "key_heads", "value_heads")),
        *((name, ctypes.c_long) for name in ("width", "value_width")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("query_at", "key_at", "value_at", "key_of", "value_of")),
    ]


def is_supported() -> bool:
    """Whether this processor has instructions that the kernels are written in."""
    return has_products() or {"avx2", "fma"} <= _instructions()


def has_products() -> bool:
    """Whether this processor multiplies bfloat16; elsewhere float32 instructions multiply what is rounded to it."""
    return "avx512_bf16" in _instructions()


@cache
def _instructions() -> frozenset[str]:
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


@cache
def library() -> ctypes.CDLL:
    """The library, compiled into build/ where it is not there yet.

    Raises:
        UsageError: the processor has neither AVX-512 BF16 nor AVX2.
        MissingDependencyError: there is no C++ compiler.
        DiffQuantError: the compiler failed.
    """
    if not is_supported():
        raise UsageError("bf16 training needs a processor with AVX-512 BF16 or AVX2; train in float32 instead")
    flags = [*_FLAGS, *(_NATIVE if has_products() else _AVX2)]
    built_from = f"{file_digest(SOURCE)}{file_digest(_HEADER)}{flags}"
    file = BUILD / f"kernels-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}.so"
    if not file.exists():
        _compile(file, flags)
    kernels = ctypes.CDLL(str(file))
    kernels.cross_entropy.restype = ctypes.c_double
    return kernels


def call(name: str, *arguments: Tensor | Layout | int | float | None) -> float:
    """Run a kernel; tensors have to be dense.

    Returns:
        what it returns, which most do not.
    """
    converted = [_converted(argument) for argument in arguments]
    returned: float = getattr(library(), name)(*converted)
    return returned


def longs(values: Sequence[int]) -> "ctypes.Array[ctypes.c_long]":
    """Numbers as a C array, which whoever points at it has to keep."""
    return (ctypes.c_long * len(values))(*values)


def _converted(argument: Tensor | Layout | int | float | None) -> object:
    if isinstance(argument, torch.Tensor):
        if not argument.is_contiguous():
            raise ValueError(f"a kernel reads dense tensors, not strides {argument.stride()}")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, Layout):
        return ctypes.byref(argument)
    if argument is None:
        return None
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument)


def _compile(file: Path, flags: list[str]) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise MissingDependencyError("bf16 training compiles its kernels: install g++ or clang++, or name one in CXX")
    BUILD.mkdir(parents=True, exist_ok=True)
    # A name of its own until it is whole: two trainings may begin at once.
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run([compiler, *flags, "-o", str(partial), str(SOURCE)], check=True, capture_output=True, text=True)
        partial.replace(file)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise DiffQuantError(f"{compiler} did not compile {SOURCE}: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
