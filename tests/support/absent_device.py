"""Triton's own CUDA driver over a libcuda that runs nothing: launches go all the way, for any GPU, without one.

What a driver refuses is refused: too much shared memory for the card, a grid whose second or third axis is too long,
a tensor descriptor whose strides, box or address the hardware does not take.
"""

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("absent_driver.c")


class AbsentDevice:
    """The device in use, which a number names: its compute capability, times ten."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._capability = 80

    @property
    def capability(self) -> int:
        return self._capability

    @capability.setter
    def capability(self, capability: int) -> None:
        self._capability = capability
        self._library.absent_driver_use(capability)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one block may have."""
        return int(self._library.absent_driver_shared_limit(self._capability))

    @property
    def launches(self) -> int:
        """Number of kernels that the driver took so far."""
        return int(self._library.absent_driver_launches())


def install() -> AbsentDevice:
    """Make Triton launch on absent devices, for the rest of this process; tensors are the host's."""
    import triton
    from triton.runtime import driver

    folder = Path(tempfile.mkdtemp(prefix="absent-driver-"))
    # Launchers are linked against it whenever one is built.
    atexit.register(shutil.rmtree, folder)
    library = _loaded(folder, Path(triton.__file__).parent / "backends/nvidia/include")
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    device = AbsentDevice(library)
    driver.set_active(_driver_of(device))
    _use_in_launch_code(device)
    return device


def _loaded(folder: Path, headers: Path) -> ctypes.CDLL:
    target = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([*command, str(_SOURCE), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def _driver_of(device: AbsentDevice) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    absent = CudaDriver()
    # The device's number keeps what Triton caches for each apart.
    absent.get_current_device = lambda: device.capability
    absent.get_current_stream = lambda _: 0
    absent.get_device_capability = lambda number: divmod(number, 10)
    absent.get_current_target = lambda: GPUTarget("cuda", device.capability, 32)
    return absent


def _use_in_launch_code(device: AbsentDevice) -> None:
    from diffquant.kernels import gpu
    from diffquant.kernels.attention import online

    def room(size: int, _alignment: int, _stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8)

    vars(gpu).update(
        compute_capability=lambda _: divmod(device.capability, 10), shared_memory=lambda _: device.shared_memory
    )
    vars(online).update(_allocate=room)
