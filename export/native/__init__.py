"""The native kernels for the CPU, of attention and of products with codes: their library, and what they use here.

A wheel carries the library where a compiler was there to build it; `python -m diffquant.export.native`
builds it in place. Without it a model's function body runs instead: the same numbers, slower.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.export.native.build import LIBRARY

OVERRIDE = "DIFFQUANT_NATIVE_LIBRARY"


def library_path() -> Path | None:
    """The library to give to `SessionOptions.register_custom_ops_library`, or None if it was not built.

    The environment's DIFFQUANT_NATIVE_LIBRARY names another; empty, it stands for none.

    Raises:
        UsageError: DIFFQUANT_NATIVE_LIBRARY names no file.
    """
    override = os.environ.get(OVERRIDE)
    if override is None:
        built = Path(__file__).with_name(LIBRARY)
        return built if built.is_file() else None
    if not override:
        return None
    if not Path(override).is_file():
        raise UsageError(f"{OVERRIDE} is {override}, which is not a file; unset it or build one there")
    return Path(override)


def kernel_name() -> str | None:
    """The instruction set of the library's attention here: avx512, avx2 or plain; None without a library."""
    return _name("diffquant_kernel_name")


def matmul_kernel_name() -> str | None:
    """The instruction set of the library's products with codes here, avx512vnni or avx2.

    None without a library, and where ONNX Runtime's own products are used because no faster ones are known.
    """
    return _name("diffquant_matmul_kernel_name")


def use_kernel(name: str) -> bool:
    """Use another instruction set in this process from now on, to test or compare it.

    Args:
        name: avx512, avx2 or plain.

    Returns:
        Whether there is a library and this processor has it.
    """
    return bool(_asked("diffquant_use_kernel", ctypes.c_int, name.encode()))


def use_matmul_kernel(name: str) -> bool:
    """Use another instruction set for products with codes, in sessions opened from now on, to test or compare it.

    To use one where ONNX Runtime's own products are the default, call this before the process's first session.

    Args:
        name: amx, avx512vnni, avx2, neon or plain.

    Returns:
        Whether there is a library and this processor has it.
    """
    return bool(_asked("diffquant_use_matmul_kernel", ctypes.c_int, name.encode()))


def kernel_calls() -> int:
    """Number of times that the library's attention has run in this process; 0 without a library."""
    return int(_asked("diffquant_kernel_calls", ctypes.c_int64) or 0)


def matmul_calls() -> int:
    """Number of products with codes that the library has computed in this process; 0 without a library."""
    return int(_asked("diffquant_matmul_calls", ctypes.c_int64) or 0)


def _name(function: str) -> str | None:
    name: bytes | None = _asked(function, ctypes.c_char_p)
    return name.decode() if name else None


def _asked(function: str, kind: type, *arguments: bytes) -> Any:
    """What a function of the library returns, of a type of C's; None without a library."""
    path = library_path()
    if path is None:
        return None
    called = getattr(ctypes.CDLL(str(path)), function)
    called.restype = kind
    return called(*arguments)
