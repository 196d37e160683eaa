"""The library of native CPU kernels for attention and quantized matmuls: its path, and its instruction sets.

A wheel contains the library if it was built with a compiler; `python -m diffquant.onnx.native` builds it in place.
Without it ONNX Runtime runs the model's function bodies, which are slower and give the same results.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.onnx.native.build import LIBRARY

OVERRIDE = "DIFFQUANT_NATIVE_LIBRARY"


def library_path() -> Path | None:
    """Return the path of the native library, or None if it was not built.

    If the environment variable DIFFQUANT_NATIVE_LIBRARY is set, it is the path of another library; if it is empty, the
    result is None.

    Raises:
        UsageError: DIFFQUANT_NATIVE_LIBRARY is not the path of a file.
    """
    override = os.environ.get(OVERRIDE)
    if override is None:
        built = Path(__file__).with_name(LIBRARY)
        return built if built.is_file() else None
    if not override:
        return None
    if not Path(override).is_file():
        raise UsageError(f"{OVERRIDE} is {override}, which is not a file; unset it, or set it to a library")
    return Path(override)


def attention_instruction_set() -> str | None:
    """Return the attention kernel's instruction set: avx512, avx2 or plain, or None if there is no library."""
    return _name("diffquant_kernel_name")


def matmul_instruction_set() -> str | None:
    """Return the instruction set of the quantized matmuls' kernel: avx512vnni or avx2, or None if it is not used.

    The kernel is used only on CPUs where it is known to be faster than ONNX Runtime's.
    """
    return _name("diffquant_matmul_kernel_name")


def use_attention_kernel(name: str) -> bool:
    """Switch this process's attention to another kernel, to test or compare it.

    Args:
        name: instruction set of the kernel: avx512, avx2 or plain.

    Returns:
        Whether the kernel can be used: the library is built, and this CPU supports the instruction set.
    """
    return bool(_call_library("diffquant_use_kernel", ctypes.c_int, name.encode()))


def use_matmul_kernel(name: str) -> bool:
    """Switch the quantized matmuls of sessions that are opened later to another kernel, to test or compare it.

    If ONNX Runtime's kernels are the default on this CPU, call this before the process's first session.

    Args:
        name: instruction set of the kernel: amx, avx512vnni, avx2, neon or plain.

    Returns:
        Whether the kernel can be used: the library is built, and this CPU supports the instruction set.
    """
    return bool(_call_library("diffquant_use_matmul_kernel", ctypes.c_int, name.encode()))


def count_attention_calls() -> int:
    """Return the number of calls of the library's attention in this process; 0 without a library."""
    return int(_call_library("diffquant_kernel_calls", ctypes.c_int64) or 0)


def count_matmul_calls() -> int:
    """Return the number of quantized matmuls that the library computed in this process; 0 without a library."""
    return int(_call_library("diffquant_matmul_calls", ctypes.c_int64) or 0)


def _name(function: str) -> str | None:
    name: bytes | None = _call_library(function, ctypes.c_char_p)
    return name.decode() if name else None


def _call_library(function: str, kind: type, *arguments: bytes) -> Any:
    """Call a function of the library and return its result, or None if there is no library."""
    path = library_path()
    if path is None:
        return None
    called = getattr(ctypes.CDLL(str(path)), function)
    called.restype = kind
    return called(*arguments)
