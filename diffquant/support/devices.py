"""Chooses devices and their dtypes, measures how fast they compute, and logs messages once."""

import logging
import time
from functools import cache

import torch

from diffquant.errors import UsageError
from diffquant.support.names import option_name

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """Return the dtype with a name; "auto" is bfloat16 if the hardware multiplies it natively, else float32.

    With AVX512-BF16 a model of 135 M parameters scored three times as many items a second as in float32
    (`git show 9dc1988f:bench/results/hellaswag-speed.json`); a CPU without native bfloat16 only emulates it.

    Raises:
        UsageError: the name is unknown.
    """
    if name == "auto":
        return torch.bfloat16 if is_bfloat16_native(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; choose from auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def as_dtype(dtype: torch.dtype | str | None, device: str = "cpu") -> torch.dtype | None:
    """Convert a name for `resolve_dtype` to its dtype; leave a dtype or None unchanged.

    Raises:
        UsageError: the name is unknown, or no model can run in the dtype.
    """
    if isinstance(dtype, str):
        return resolve_dtype(dtype, device)
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UsageError(f"a model cannot run in {dtype}: expected torch.bfloat16, float16, float32 or float64")
    return dtype


def is_bfloat16_native(device: str = "cpu") -> bool:
    """Return whether a device has bfloat16 matrix instructions."""
    if torch.device(device).type == "cuda":
        # torch checks only the current device.
        with torch.cuda.device(torch.device(device)):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if torch.device(device).type != "cpu":
        return False
    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(bool(flags.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def resolve_device(name: str = "auto") -> str:
    """Return the device with a name; "auto" is CUDA if torch finds a CUDA device, else the CPU.

    Raises:
        UsageError: see `check_device`.
    """
    if name == "auto":
        return _fastest_device()
    check_device(name)
    return name


def describe_device(device: str) -> str:
    """Return a device with its product name, such as "cuda (NVIDIA H200)"."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if torch.device(device).type == "cuda" else device


def _fastest_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Check that a device can be used.

    Raises:
        UsageError: torch does not know the name, or finds no such device.
    """
    try:
        named = torch.device(device)
        if named.type != "cuda":
            torch.empty(0, device=named)
    except Exception as error:  # each of torch's backends raises its own
        raise UsageError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N") from error
    if named.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"no device {device!r}: torch finds no CUDA device; use {option_name('device', 'cpu')}")
    if named.type == "cuda" and (named.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no device {device!r}: torch finds {torch.cuda.device_count()} CUDA devices")


# Rows and columns of the timed matrices; a product takes some milliseconds.
_ROWS, _WIDTH = 64, 1024


def measure_seconds_per_weight() -> float:
    """Measure the seconds that a float32 matrix product takes per weight and token, on all threads."""
    x, matrix = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        x @ matrix
        seconds.append(time.perf_counter() - started)
    # Other programs disturbed the fastest least.
    return min(seconds) / (x.numel() * _WIDTH)


def log_once(logger: str, level: int, message: str, *values: object) -> None:
    """Log a message once for each set of values.

    Compiled code skips it: a logger would break torch.compile's graph.
    """
    if not torch.compiler.is_compiling():
        _log_once(logger, level, message, *values)


@cache
def _log_once(logger: str, level: int, message: str, *values: object) -> None:
    logging.getLogger(logger).log(level, message, *values)
