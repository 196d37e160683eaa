"""Devices, and the dtype in which each evaluates models."""

import torch

from diffquant.errors import UsageError
from diffquant.support.spelling import spelled

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """A dtype by name; "auto" is bfloat16 if the hardware multiplies it natively, else float32.

    With AVX512-BF16 a model of 135 M parameters scored three times as many items a second as in float32
    (bench/results/hellaswag-speed.json); a CPU without native bfloat16 only emulates it.

    Raises:
        UsageError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if is_bfloat16_native(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; known are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def as_dtype(dtype: torch.dtype | str | None, device: str = "cpu") -> torch.dtype | None:
    """A dtype given as such or by a name for `resolve_dtype`; None stays None.

    Raises:
        UsageError: the name is unknown, or no model can run in the dtype.
    """
    if isinstance(dtype, str):
        return resolve_dtype(dtype, device)
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise UsageError(f"a model cannot run in {dtype}: expected torch.bfloat16, float16, float32 or float64")
    return dtype


def is_bfloat16_native(device: str = "cpu") -> bool:
    """Whether a device has bfloat16 matrix instructions."""
    if torch.device(device).type == "cuda":
        # torch answers for the current device.
        with torch.cuda.device(torch.device(device)):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if torch.device(device).type != "cpu":
        return False
    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(bool(flags.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def resolve_device(name: str = "auto") -> str:
    """A device by name; "auto" is CUDA if torch finds a CUDA device, else the CPU.

    Raises:
        UsageError: as `check_device` raises it.
    """
    if name == "auto":
        return _fastest_device()
    check_device(name)
    return name


def describe_device(device: str) -> str:
    """A device with its product name, such as "cuda (NVIDIA H200)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if torch.device(device).type == "cuda" else device


def _fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Check that a device can be used.

    Raises:
        UsageError: torch does not know the name, or the device does not exist.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device 'cuda' is not there: torch finds no CUDA device; use {spelled('device', 'cpu')}")
