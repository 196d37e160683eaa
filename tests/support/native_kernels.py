"""Which kernels the native library runs in this process, how often, and how to choose others."""

import ctypes

from diffquant.onnx.native import call_library


def matmul_instruction_set() -> str | None:
    """Return the instruction set of the quantized matmuls' kernel: avx512vnni or avx2, or None if it is not used.

    The kernel is used only on CPUs where it is known to be faster than ONNX Runtime's.
    """
    name: bytes | None = call_library("diffquant_matmul_kernel_name", ctypes.c_char_p)
    return name.decode() if name else None


def use_attention_kernel(name: str) -> bool:
    """Switch this process's attention to another kernel, to test or compare it.

    Args:
        name: instruction set of the kernel: avx512, avx2 or plain.

    Returns:
        Whether the kernel can be used: the library is built, and this CPU supports the instruction set.
    """
    return bool(call_library("diffquant_use_kernel", ctypes.c_int, name.encode()))


def use_matmul_kernel(name: str) -> bool:
    """Switch the quantized matmuls of sessions that are opened later to another kernel, to test or compare it.

    If ONNX Runtime's kernels are the default on this CPU, call this before the process's first session.

    Args:
        name: instruction set of the kernel: amx, avx512vnni, avx2, neon or plain.

    Returns:
        Whether the kernel can be used: the library is built, and this CPU supports the instruction set.
    """
    return bool(call_library("diffquant_use_matmul_kernel", ctypes.c_int, name.encode()))


def count_attention_calls() -> int:
    """Return the number of calls of the library's attention in this process; 0 without a library."""
    return int(call_library("diffquant_kernel_calls", ctypes.c_int64) or 0)


def count_matmul_calls() -> int:
    """Return the number of quantized matmuls that the library computed in this process; 0 without a library."""
    return int(call_library("diffquant_matmul_calls", ctypes.c_int64) or 0)
