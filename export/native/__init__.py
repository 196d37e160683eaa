"""The native kernels for the CPU, of attention and of products with codes: their library, and what they use here.

A wheel carries the library where a compiler was there to build it; `python -m diffquant.export.native`
builds it in place. Without it a model's function body runs instead: the same numbers, slower.
"""

import ctypes
import os
from pathlib import Path

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
    library = _loaded()
    if library is None:
        return None
    library.diffquant_kernel_name.restype = ctypes.c_char_p
    name: bytes = library.diffquant_kernel_name()
    return name.decode()


def matmul_kernel_name() -> str | None:
    """The instruction set of the library's products with codes here, avx512vnni or avx2.

    None without a library, and where ONNX Runtime's own products are used because no faster ones are known.
    """
    library = _loaded()
    if library is None:
        return None
    library.diffquant_matmul_kernel_name.restype = ctypes.c_char_p
    name: bytes | None = library.diffquant_matmul_kernel_name()
    return name.decode() if name else None


def use_kernel(name: str) -> bool:
    """Use another instruction set in this process from now on, to test or compare it.

    Args:
        name: avx512, avx2 or plain.

    Returns:
        Whether there is a library and this processor has it.
    """
    library = _loaded()
    return library is not None and bool(library.diffquant_use_kernel(name.encode()))


def use_matmul_kernel(name: str) -> bool:
    """Use another instruction set for products with codes, in sessions opened from now on, to test or compare it.

    To use one where ONNX Runtime's own products are the default, call this before the process's first session.

    Args:
        name: amx, avx512vnni, avx2, neon or plain.

    Returns:
        Whether there is a library and this processor has it.
    """
    library = _loaded()
    return library is not None and bool(library.diffquant_use_matmul_kernel(name.encode()))


def kernel_calls() -> int:
    """Number of times that the library's attention has run in this process; 0 without a library."""
    library = _loaded()
    if library is None:
        return 0
    library.diffquant_kernel_calls.restype = ctypes.c_int64
    return int(library.diffquant_kernel_calls())


def matmul_calls() -> int:
    """Number of products with codes that the library has computed in this process; 0 without a library."""
    library = _loaded()
    if library is None:
        return 0
    library.diffquant_matmul_calls.restype = ctypes.c_int64
    return int(library.diffquant_matmul_calls())


def _loaded() -> ctypes.CDLL | None:
    path = library_path()
    return None if path is None else ctypes.CDLL(str(path))
