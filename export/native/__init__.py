"""The library of native CPU kernels for attention and quantized matmuls: its path, and calls of its functions.

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
    name: bytes | None = call_library("diffquant_kernel_name", ctypes.c_char_p)
    return name.decode() if name else None


def call_library(function: str, kind: type, *arguments: bytes) -> Any:
    """Call a function of the library and return its result, or None if there is no library.

    Args:
        kind: type of the result in `ctypes`.
    """
    path = library_path()
    if path is None:
        return None
    called = getattr(ctypes.CDLL(str(path)), function)
    called.restype = kind
    return called(*arguments)
