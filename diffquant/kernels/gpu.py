"""Requirements of the kernels on a device and on the Triton that compiles them for it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import cast

import torch

from diffquant.errors import UsageError

# `constexpr_function`, `knobs` and tensor descriptors made on the host are all there from 3.6 on; older ones lack some.
OLDEST_TRITON = (3, 6)
# Before it Triton compiles products for Hopper wrongly whose left side is made in registers: it writes the registers
# anew while products that were not waited for still read them (triton-lang/triton#9433).
_RIGHT_ON_HOPPER = (3, 7)
# Shared memory of a block on Ampere's and Ada's smaller devices and on consumer Blackwell: 99 KiB.
SMALLEST_SHARED_MEMORY = 101_376


@dataclass(frozen=True)
class AbsentGpu:
    """A GPU that kernels are compiled for without one.

    Attributes:
        capability: compute capability.
        shared_memory: bytes of shared memory that one block may ask for.
        processors: number of multiprocessors.
        bytes_a_second: bytes that a copy moves in a second; None means an H100's share for each multiprocessor.
    """

    capability: tuple[int, int]
    shared_memory: int
    processors: int
    bytes_a_second: float | None = None


# A copy reaches about nine tenths of the data sheets' 3.35 and 4.8 TB/s.
COPY_REACHES = 0.9
H100 = AbsentGpu((9, 0), 232_448, 132, 3.35e12 * COPY_REACHES)
H200 = AbsentGpu((9, 0), 232_448, 132, 4.8e12 * COPY_REACHES)
_assumed: AbsentGpu | None = None


@contextmanager
def assuming(absent: AbsentGpu) -> Iterator[None]:
    """Make launch code cut its work for a GPU that is not there, while its tensors are the host's."""
    global _assumed  # noqa: PLW0603
    before, _assumed = _assumed, absent
    try:
        yield
    finally:
        _assumed = before


def device_refusal(device: torch.device) -> str | None:
    """Reason why no Triton kernel runs on a device, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if torch.version.hip:
        return "the kernels are written for NVIDIA's devices, and this torch is built for AMD's"
    installed = triton_version()
    if installed is None:
        return "Triton is not installed"
    if installed < OLDEST_TRITON:
        return (
            f"the kernels need Triton {_dotted(OLDEST_TRITON)} or newer, which comes with torch 2.10; "
            f"installed is {_dotted(installed)}"
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0 (Ampere) or newer"
    return None


def unpacked_product_refusal(device: torch.device) -> str | None:
    """Reason why no kernel may multiply by weights that it unpacks in registers (`gemm`) on a device, or None."""
    installed = triton_version()
    if device_class(device) != "sm_90" or installed is None or installed >= _RIGHT_ON_HOPPER:
        return None
    return (
        f"Triton {_dotted(installed)} compiles products of weights unpacked in registers wrongly for Hopper "
        f"(triton-lang/triton#9433); Triton {_dotted(_RIGHT_ON_HOPPER)} does not"
    )


def fp8_refusal(device: torch.device) -> str | None:
    """Reason why no kernel multiplies in fp8 on a device, or None."""
    if capability(device) < (8, 9):
        return "P·V in fp8 needs compute capability 8.9 (Ada, Hopper) or newer; use pv='fp16'"
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device; the interpreter runs as 8.0.

    Raises:
        UsageError: the device runs no Triton kernel.
    """
    if _assumed is not None:
        return _assumed.capability
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return (8, 0)
    raise UsageError(f"Triton kernels run on CUDA devices, not on {device.type}")


def device_class(device: torch.device) -> str:
    """Class of a device: "sm_90" (Hopper) or "sm_80" (every other device from Ampere on)."""
    return "sm_90" if capability(device)[0] == 9 else "sm_80"


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may ask for; the interpreter has the smallest devices'."""
    if _assumed is not None:
        return _assumed.shared_memory
    return _shared_memory_of(device) if device.type == "cuda" else SMALLEST_SHARED_MEMORY


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a device; the interpreter has eight."""
    if _assumed is not None:
        return _assumed.processors
    return _processors_of(device) if device.type == "cuda" else 8


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on a device is expected to move, read and written ones together.

    By its memory's clock and width; where torch does not tell them, an H100's share for each multiprocessor.
    """
    known = _assumed.bytes_a_second if _assumed is not None else None
    if known is None and _assumed is None and device.type == "cuda":
        known = _bandwidth_of(device)
    return known or processors(device) * cast(float, H100.bytes_a_second) / H100.processors


@cache
def _bandwidth_of(device: torch.device) -> float | None:
    properties = torch.cuda.get_device_properties(device)
    # In kHz, two transfers a cycle, and bits.
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * clock * width / 8 * COPY_REACHES or None


@cache
def _shared_memory_of(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch's stubs leave it out


@cache
def _processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def registers_of(blocks: int, warps: int) -> int:
    """Number of registers that a thread may take for a multiprocessor, which has 65,536, to hold this many blocks."""
    return min(65_536 // (blocks * warps * 32) // 8 * 8, 255)


@cache
def triton_version() -> tuple[int, int] | None:
    """Major and minor version of Triton; None if it is not installed."""
    # Looked up once, since every layer of every step asks.
    if find_spec("triton") is None:
        return None
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
