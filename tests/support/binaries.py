"""Binaries of compiled kernels: what one uses of a GPU, read from its machine code."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.machine_code import (
    block_barriers,
    counted,
    innermost_loops,
    instructions,
    multiply_adds,
    overwritten_operands,
    under_way_at_exponentials,
)

# Registers of a thread and warps of a block are set anew where a kernel gives its warps different work.
_SPECIALIZES = "USETMAXREG"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        kernel: name of its function.
        capability: compute capability, times ten.
        registers: number of registers of a thread.
        stack: bytes of stack of a thread, which is where registers spill to.
        shared: bytes of shared memory of a block.
        warps: number of warps of a block.
        opcodes: number of times each machine instruction occurs, by the name before its first dot.
        main_loops: opcodes of each innermost loop that uses the tensor cores.
        products: multiply-adds of each of these loops by operand width in bits (16, 8), a warpgroup on Hopper's
            asynchronous products and a warp on others.
        hiding: share of each of these loops' asynchronous products that is under way while it computes exponentials.
        barriers: number of barriers of each of these loops at which all warps of a block meet.
        early_loads: number of loads before it waits for the kernel that runs ahead of it; 0 where it never does.
        overwritten: instructions of these loops that write what a product under way may still read.
        pointers: types of the tensors it takes, by argument.
    """

    kernel: str
    capability: int
    registers: int
    stack: int
    shared: int
    warps: int
    opcodes: dict[str, int]
    main_loops: list[dict[str, int]]
    products: list[dict[str, int]]
    hiding: list[float]
    barriers: list[int]
    early_loads: int
    overwritten: list[str]
    pointers: dict[str, str]

    @property
    def is_specialized(self) -> bool:
        """Whether its warps do different work: some load, others compute, each with loops of their own."""
        return _SPECIALIZES in self.opcodes

    def spills_in_a_main_loop(self) -> bool:
        """Whether a loop over tensor cores reads or writes the stack."""
        return any(loop.get("LDL", 0) + loop.get("STL", 0) for loop in self.main_loops)

    def waits_for_each_product(self) -> bool:
        """Whether the assembler, short of registers, gave up running Hopper's products asynchronously."""
        kinds = ("HGMMA", "IGMMA", "QGMMA")
        products = (sum(loop.get(kind, 0) for kind in kinds) for loop in self.main_loops)
        # An arrival and a wait go with a group of products, or with each.
        return any(
            loop.get("WARPGROUP", 0) >= 2 * count > 2 for loop, count in zip(self.main_loops, products, strict=True)
        )


def read_binary(kernel: Any, capability: int) -> Binary:
    """Resources of a kernel that Triton compiled.

    Args:
        kernel: what a launch of a jitted function gives.
        capability: compute capability that it was compiled for, times ten.

    Raises:
        RuntimeError: cuobjdump cannot read it.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        dumps = [
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=False)
            for flag in ("-res-usage", "-sass")
        ]
    if any(dump.returncode for dump in dumps):
        raise RuntimeError(
            f"cuobjdump cannot read {kernel.metadata.name}, {len(kernel.asm['cubin'])} bytes: {dumps[0].stderr.strip()}"
        )
    usage, sass = (dump.stdout for dump in dumps)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    code = instructions(sass)
    loops = [loop for loop in innermost_loops(code) if any("MMA" in each.text for each in loop)]
    return Binary(
        kernel=kernel.metadata.name,
        capability=capability,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        warps=_warps(kernel.asm["ptx"], kernel.metadata.num_warps),
        opcodes=counted(code),
        main_loops=[counted(loop) for loop in loops],
        products=[multiply_adds(loop) for loop in loops],
        hiding=[under_way_at_exponentials(loop) for loop in loops],
        barriers=[block_barriers(loop) for loop in loops],
        early_loads=_loads_before_waiting([each.opcode for each in code]),
        overwritten=[fault for loop in loops for fault in overwritten_operands(loop)],
        pointers={
            name: kind for name, kind in kernel.src.signature.items() if isinstance(kind, str) and kind.startswith("*")
        },
    )


def _loads_before_waiting(opcodes: list[str]) -> int:
    """Number of loads before the assembler's griddepcontrol.wait."""
    wait = opcodes.index("ACQBULK") if "ACQBULK" in opcodes else 0
    return opcodes[:wait].count("LDG")


def _warps(ptx: str, named: int) -> int:
    """Number of warps of a block, those that warp specialization adds included."""
    threads = re.search(r"\.reqntid (\d+)", ptx)
    return int(threads[1]) // 32 if threads else named
