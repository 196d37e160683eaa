"""Triton's launches run here, on the host's tensors: kernels are compiled as far as PTX, for a GPU that is not there.

    with launches_run_here(capability=90) as launched:
        kernel[grid](tensor, 3, BLOCK=64)

`TRITON_INTERPRET` has to be off before kernels are imported. Triton caches what it compiles, of which the machine code
is missing here: give it a folder of its own (`TRITON_CACHE_DIR`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.ptx import arithmetic, copying, matrices, movement  # noqa: F401  # they declare opcodes
from tests.support.ptx.block import PARAMETER_BYTES, PARAMETERS, Block
from tests.support.ptx.dependents import Reached
from tests.support.ptx.graphs import captured
from tests.support.ptx.memory import Buffer, GlobalMemory
from tests.support.ptx.parsing import Fault, Program, parse

# A Hopper's shared memory is 227 KiB a block; kernels say how much of it they take.
_SCRATCH_ALIGNMENT = 128


@dataclass
class Launch:
    """A launch that ran.

    Attributes:
        executed: number of instructions that all blocks executed.
        reached: what they loaded and stored.
        is_dependent: whether it may begin while the launch before still runs.
    """

    name: str
    grid: tuple[int, int, int]
    executed: int
    reached: list[Reached]
    is_dependent: bool


@dataclass
class Arguments:
    """A launch's arguments as its entry takes them.

    Attributes:
        words: a word for each parameter, floats as their bits.
        buffers: storages of the tensors.
        tensor_maps: fields of maps made on the host, by the number of their parameter.
        held: what has to live as long as the launch.
    """

    words: list[int] = field(default_factory=list)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    tensor_maps: dict[int, dict[str, int]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)

    def add_tensor(self, tensor: Tensor) -> None:
        """A pointer to a tensor, whose whole storage may be reached."""
        storage = tensor.untyped_storage()
        # Threads may write to halves of an integer, which packs what is smaller.
        unit = tensor.element_size() if tensor.is_floating_point() or tensor.element_size() == 4 else 1
        if storage.nbytes():
            known = self.buffers.get(storage.data_ptr())
            unit = min(unit, known.unit) if known else unit
            self.buffers[storage.data_ptr()] = Buffer(storage.data_ptr(), storage.nbytes(), unit, storage)
        self.words.append(tensor.data_ptr())

    def add_tensor_map(self, descriptor: Any, meta: dict[str, Any]) -> None:
        """A tensor map made on the host, then its shape and strides."""
        self.add_tensor(descriptor.base)
        self.words.pop()
        fields = {"global_address": descriptor.base.data_ptr()}
        fields |= {"elemtype": int(meta["elem_type"]), "swizzle_mode": int(meta["swizzle"])}
        for axis, (size, box) in enumerate(zip(descriptor.shape[::-1], meta["block_size"][::-1], strict=True)):
            fields |= {f"global_dim {axis}": int(size), f"box_dim {axis}": int(box)}
        for axis, stride in enumerate(descriptor.strides[-2::-1]):
            fields[f"global_stride {axis}"] = int(stride) * descriptor.base.element_size()
        self.tensor_maps[len(self.words)] = fields
        self.words += [0, *map(int, descriptor.shape), *map(int, descriptor.strides)]

    def add_scratch(self, nbytes: int) -> None:
        """Memory that the kernel asked for, which no tensor holds."""
        scratch = torch.zeros(nbytes + _SCRATCH_ALIGNMENT, dtype=torch.uint8)
        self.held.append(scratch)
        self.add_tensor(scratch)
        self.words[-1] += -self.words[-1] % _SCRATCH_ALIGNMENT


def run(
    program: Program,
    grid: Sequence[int],
    threads: int,
    shared_bytes: int,
    arguments: Arguments,
    before: Sequence[Launch] | None = None,
) -> Launch:
    """Run a kernel's blocks, one after another.

    Args:
        before: the launches so far, of a launch that may begin while the last of them still runs.

    Raises:
        Fault: as the package says.
    """
    if len(program.parameters) != len(arguments.words):
        raise Fault(f"{program.name} takes {len(program.parameters)} parameters, not {len(arguments.words)}")
    memory = GlobalMemory(list(arguments.buffers.values()), _unfinished(before or ()))
    parameters = {p.name: word for p, word in zip(program.parameters, arguments.words, strict=True)}
    x, y, z = (*grid, 1, 1)[:3]
    executed = 0
    for number in range(x * y * z):
        place = number % x, number // x % y, number // x // y
        maps = {PARAMETERS + PARAMETER_BYTES * at: dict(fields) for at, fields in arguments.tensor_maps.items()}
        memory.begin(number)
        block = Block(program, threads, shared_bytes, memory, parameters, maps, place, (x, y, z))
        try:
            with np.errstate(all="ignore"):
                block.run()
        except Fault as fault:
            fault.add_note(f"in block {place} of {program.name}")
            raise
        executed += block.executed
    return Launch(program.name, (x, y, z), executed, memory.reached(), before is not None)


def _unfinished(launches: Sequence[Launch]) -> list[Reached]:
    """What launches reach that may still run when a dependent one begins: the last that was none, and all since."""
    found: list[Reached] = []
    for launch in reversed(launches):
        found += launch.reached
        if not launch.is_dependent:
            break
    return found


@contextmanager
def launches_run_here(capability: int) -> Iterator[list[Launch]]:
    """Run what Triton launches in this process on the host; the launches so far are in the list that is given.

    Args:
        capability: compute capability that kernels are compiled for, times ten.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver, jit

    class Absent:
        def get_current_device(self) -> int:
            return capability

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

    launched: list[Launch] = []
    compiled, add_stages = jit.JITFunction.run, CUDABackend.add_stages

    def as_far_as_ptx(self: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        add_stages(self, stages, options, language)
        stages["cubin"] = lambda _source, _metadata: b"none"

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compiled(self, *args, grid=grid, **(options | {"warmup": True}))
        if not warmup:
            sizes = grid({**options}) if callable(grid) else grid

            def work() -> None:
                before = launched if options.get("launch_pdl") else None
                launched.append(_launch(self, kernel, sizes, args, options, before))

            if not captured(work):
                work()
        return kernel

    jit.JITFunction.run, CUDABackend.add_stages = launch, as_far_as_ptx
    driver.set_active(Absent())
    try:
        yield launched
    finally:
        jit.JITFunction.run, CUDABackend.add_stages = compiled, add_stages


_parse: Callable[[str], Program] = cache(parse)


def _launch(
    function: Any,
    kernel: Any,
    grid: Sequence[int],
    args: tuple[Any, ...],
    options: dict[str, Any],
    before: Sequence[Launch] | None,
) -> Launch:
    program = _parse(kernel.asm["ptx"])
    given = dict(zip(function.arg_names, args, strict=False)) | options
    arguments = Arguments()
    maps = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    for name, kind in kernel.src.signature.items():
        _add(arguments, given.get(name), kind, maps)
    blocks = int(np.prod(grid))
    arguments.add_scratch(int(getattr(kernel.metadata, "global_scratch_size", 0) or 0) * blocks)
    arguments.add_scratch(0)
    threads = program.threads or 32 * kernel.metadata.num_warps
    return run(program, grid, threads, max(int(kernel.metadata.shared), 16), arguments, before)


def _add(arguments: Arguments, value: Any, kind: Any, maps: Iterator[dict[str, Any]]) -> None:
    """Add an argument of a signature's type, or of several: those of a tuple, or of what a descriptor holds."""
    if kind == "constexpr":
        return
    if isinstance(kind, tuple | list):
        for each, kind_of_it in zip(value, kind, strict=True):
            _add(arguments, each, kind_of_it, maps)
    elif kind.startswith("tensordesc"):
        arguments.add_tensor_map(value, next(maps))
    elif isinstance(value, Tensor):
        arguments.add_tensor(value)
    elif kind in ("fp32", "f32"):
        arguments.words.append(int(np.float32(value).view(np.uint32)))
    else:
        arguments.words.append(int(value) & 0xFFFFFFFFFFFFFFFF)
