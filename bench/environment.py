"""The environment of a measurement, without which a number means nothing: device, versions, date, commit and code."""

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from diffquant.support.code import code_digest, commit
from diffquant.support.machine import cores
from diffquant.support.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "compressed-tensors")

# Processors of one name differ in these, and in speed by several times.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "bf16", "sve")

# Its sections reach whatever the programs beside it time.
_BENCH = "diffquant.bench.run"


def environment(*packages: str) -> dict[str, Any]:
    """Device, versions (of further packages, too), date, commit and digest of the code, as plain data."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "code": code_digest((_BENCH,)),
        "device": _gpu_name() or _cpu_name(),
        "cpu": _cpu_name(),
        "instructions": [name for name in _INSTRUCTIONS if name in _cpu_line("flags", "Features").split()],
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {"diffquant": __version__} | {package: _version(package) for package in (*_PACKAGES, *packages)},
    }


def _gpu_name() -> str | None:
    """Name of the CUDA device of a program that uses one; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _cpu_line(*heads: str) -> str:
    """The first processor's entry in /proc/cpuinfo under one of these heads; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(heads)), "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
