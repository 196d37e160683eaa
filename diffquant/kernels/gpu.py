"""Properties of GPUs, requirements of the kernels and of Triton, and which kernels run on a GPU."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from diffquant.errors import UsageError
from diffquant.kernels.configs import VARIABLE

# The kernels use `constexpr_function`, `knobs` and host-side tensor descriptors; older versions lack some of these.
OLDEST_TRITON = (3, 6)
# Earlier versions miscompile warpgroup products whose left operand is computed in registers: registers are overwritten
# while running products still read them (triton-lang/triton#9433).
_RIGHT_ON_HOPPER = (3, 7)
# Shared memory per thread block on Ampere's and Ada's smaller devices and on consumer Blackwell: 99 KiB.
SMALLEST_SHARED_MEMORY = 101_376


# Fraction of the data sheets' bandwidths that a copy reaches, and what an H100, of 3.35 TB/s, gives a multiprocessor.
COPY_REACHES = 0.9
_BYTES_A_SECOND_EACH = 3.35e12 * COPY_REACHES / 132


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU for which launches are planned.

    Attributes:
        capability: compute capability.
        shared_memory: maximum shared memory per thread block in bytes.
        processors: number of multiprocessors.
        bytes_per_second: memory bandwidth of a copy, reads and writes in total. None means as much per multiprocessor
            as on an H100.
    """

    capability: tuple[int, int]
    shared_memory: int
    processors: int
    bytes_per_second: float | None = None


_INTERPRETER = Gpu((8, 0), SMALLEST_SHARED_MEMORY, 8)


def device_refusal(device: torch.device) -> str | None:
    """Return why Triton kernels do not run on a device, or None if they do."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device.type}"
    if torch.version.hip:
        return "the kernels support only NVIDIA GPUs, but this torch is built for AMD's"
    installed = triton_version()
    if installed is None:
        return "Triton is not installed"
    if installed < OLDEST_TRITON:
        return (
            f"the kernels need Triton {_version_text(OLDEST_TRITON)} or newer, which comes with torch 2.10; "
            f"installed is {_version_text(installed)}"
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton kernels need compute capability 8.0 (Ampere) or newer"
    return None


def warpgroup_refusal(device: torch.device) -> str | None:
    """Return why `gemm` cannot use warpgroup products with weights unpacked in registers, or None if it can."""
    installed = triton_version()
    if device_class(device) != "sm_90" or installed is None or installed >= _RIGHT_ON_HOPPER:
        return None
    return (
        f"Triton {_version_text(installed)} miscompiles a warpgroup's products of weights unpacked in registers "
        f"(triton-lang/triton#9433); install Triton {_version_text(_RIGHT_ON_HOPPER)} or newer"
    )


def fp8_pv_refusal(device: torch.device) -> str | None:
    """Return why a device does not support P·V in fp8 in the attention kernels, or None if it does."""
    if compute_capability(device) < (8, 9):
        return "P·V in fp8 needs compute capability 8.9 (Ada, Hopper) or newer; use pv='fp16'"
    return None


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a device; on a CPU, those assumed for launches on Triton's interpreter."""
    # Cached, since every layer of every step uses it.
    if device.type != "cuda":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    # The clock is in kHz, with two transfers per cycle; the bus width is in bits. Not every torch reports them.
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return Gpu(
        torch.cuda.get_device_capability(device),
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs leave it out
        properties.multi_processor_count,
        2e3 * clock * width / 8 * COPY_REACHES or None,
    )


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device, or (8, 0) for Triton's interpreter.

    Raises:
        UsageError: Triton kernels do not run on the device.
    """
    gpu = gpu_of(device)
    if gpu is _INTERPRETER and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(f"Triton kernels run on CUDA devices, not on {device.type}")
    return gpu.capability


def device_class(device: torch.device) -> str:
    """Return the class of a device: "sm_90" for Hopper, "sm_80" for all others since Ampere."""
    return "sm_90" if compute_capability(device)[0] == 9 else "sm_80"


def shared_memory(device: torch.device) -> int:
    """Return a device's maximum shared memory per thread block in bytes.

    For Triton's interpreter it is that of the GPUs with the least.
    """
    return gpu_of(device).shared_memory


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, or 8 for the interpreter."""
    return gpu_of(device).processors


def bandwidth(device: torch.device) -> float:
    """Estimate the bytes per second that a copy on a device reads and writes in total."""
    gpu = gpu_of(device)
    return gpu.bytes_per_second or gpu.processors * _BYTES_A_SECOND_EACH


def registers_per_thread(blocks: int, warps: int) -> int:
    """Return how many registers a thread may use if `blocks` thread blocks of `warps` warps share a multiprocessor."""
    return min(65_536 // (blocks * warps * 32) // 8 * 8, 255)


@cache
def triton_version() -> tuple[int, int] | None:
    """Return Triton's major and minor version, or None if it is not installed."""
    # Cached, since every layer of every step uses it.
    if find_spec("triton") is None:
        return None
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _version_text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# Architectures for which the built-in configurations were made.
_ARCHITECTURES = {"sm_80": "Ampere", "sm_90": "Hopper"}


@dataclass(frozen=True)
class KernelSurvey:
    """Which kernels a device can run.

    Attributes:
        capability: compute capability, as in "9.0".
        shared_memory: maximum shared memory per thread block in bytes.
        triton: version of Triton, or None if it is not installed.
        table: device class whose configurations are used.
        tuned: file of tuned configurations, or None.
        refused: reason why a kernel does not run, by kernel; kernels that run are not listed.
    """

    capability: str
    shared_memory: int
    triton: str | None
    table: str
    tuned: str | None
    refused: dict[str, str]

    def __str__(self) -> str:
        is_own = self.table.removeprefix("sm_") == self.capability.replace(".", "")
        tables = f"{_ARCHITECTURES[self.table]}'s configurations ({self.table})" + (
            "" if is_own else ", since none was tuned for this device"
        )
        lines = [
            f"CUDA kernels: capability {self.capability}, {self.shared_memory:,} bytes of shared memory per block, "
            f"Triton {self.triton or 'not installed'}, {tables}" + (f", tuned by {self.tuned}" if self.tuned else "")
        ]
        return "\n".join([*lines, *(f"  not {kernel}: {reason}" for kernel, reason in self.refused.items())])


def survey_kernels(device: torch.device) -> KernelSurvey:
    """Find out which kernels a CUDA device can run, and why others cannot."""
    version = triton_version()
    everything = device_refusal(device)
    refusals = {
        "packed linear layers of more than 256 tokens, which dequantize the weight first": warpgroup_refusal(device),
        "attention triton-fp8": fp8_pv_refusal(device),
    }
    if everything is not None:
        refusals = {"any of them": everything}
    return KernelSurvey(
        capability=".".join(map(str, compute_capability(device))),
        shared_memory=shared_memory(device),
        triton=None if version is None else ".".join(map(str, version)),
        table=device_class(device),
        tuned=os.environ.get(VARIABLE),
        refused={kernel: reason for kernel, reason in refusals.items() if reason is not None},
    )
