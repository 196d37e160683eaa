"""Kernels compiled for a GPU that is not there, through their own launch code; nothing is launched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from diffquant.bench.gpu.binaries import Binary, read_binary
from diffquant.kernels.gpu import AbsentGpu, assuming


@dataclass(frozen=True)
class Launch:
    """A launch as its code asked for it.

    Attributes:
        binary: kernel that it compiled.
        programs: number of blocks.
    """

    binary: Binary
    programs: int


def compile_launches(call: Callable[[], object], absent: AbsentGpu) -> list[Launch]:
    """Launches that a call makes, compiled for an absent GPU. The call's tensors are the host's.

    `TRITON_INTERPRET` has to be off before kernels are imported, and Triton launches nothing in this process again.
    """
    capability = 10 * absent.capability[0] + absent.capability[1]
    with torch.no_grad(), assuming(absent), _recorded(capability) as recorded:
        call()
    return [Launch(read_binary(kernel, capability), programs) for kernel, programs in recorded]


@contextmanager
def _recorded(capability: int) -> Iterator[list[tuple[Any, int]]]:
    """Compiled kernels and numbers of programs of the launches that are asked for; Triton runs none of them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    class Absent:
        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

    recorded: list[tuple[Any, int]] = []
    run = jit.JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, **(options | {"warmup": True}))
        recorded.append((kernel, prod(grid)))
        return kernel

    jit.JITFunction.run = compiled
    driver.set_active(Absent())
    try:
        yield recorded
    finally:
        jit.JITFunction.run = run
