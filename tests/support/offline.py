"""Kernels compiled for a GPU that is not there, through their own launch code, and what the binaries use.

A test module that defines `launches()`, an iterator of (name, capability, call), asks for `compiled(__file__)`:
in a process of its own, where kernels are not interpreted, each call runs on CPU tensors and launches into a driver
that runs nothing (`tests.support.absent_device`). Triton's cache keeps what was compiled.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.absent_device import install
from tests.support.sass import counted, innermost_loops, instructions, overwritten_operands

# Bytes of shared memory that every device has which takes a table's configurations: sm_80's serves the smaller Ampere,
# Ada and consumer Blackwell too.
SHARED_LIMIT = {80: 101_376, 90: 232_448}


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        kernel: name of its function.
        capability: compute capability, times ten.
        registers: number of registers of a thread.
        stack: bytes of stack of a thread, which is where registers spill to.
        shared: bytes of shared memory of a block.
        opcodes: number of times each machine instruction occurs, by the name before its first dot.
        main_loops: opcodes of each innermost loop that uses the tensor cores.
        overwritten: instructions of these loops that write what a product under way may still read.
        pointers: types of the tensors it takes, by argument.
    """

    kernel: str
    capability: int
    registers: int
    stack: int
    shared: int
    opcodes: dict[str, int]
    main_loops: list[dict[str, int]]
    overwritten: list[str]
    pointers: dict[str, str]

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


def compiled(module_file: str, triton: Path | None = None) -> dict[str, list[Binary]]:
    """Kernels that each of a test module's `launches()` launched, by launch name.

    Args:
        module_file: file of the test module.
        triton: folder of another Triton than the one that is installed.
    """
    root = Path(__file__).parents[2]
    module = ".".join(Path(module_file).relative_to(root).with_suffix("").parts)
    paths = os.pathsep.join(map(str, (root,) if triton is None else (triton, root)))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", __name__, module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    binaries_by_launch = json.loads(done.stdout.splitlines()[-1])
    return {name: [Binary(**binary) for binary in binaries] for name, binaries in binaries_by_launch.items()}


def main(module: str) -> None:
    import torch
    from triton.runtime import jit

    device = install()
    launched: list[Any] = []
    run = jit.JITFunction.run

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(run(self, *args, **options))
        return launched[-1]

    jit.JITFunction.run = recorded
    binaries = {}
    with torch.no_grad():
        for name, device.capability, call in importlib.import_module(module).launches():
            launched.clear()
            before = device.launches
            call()
            if device.launches - before != len(launched):
                raise RuntimeError(
                    f"{name}: {len(launched)} launches, of which the driver saw {device.launches - before}"
                )
            binaries[name] = [asdict(_binary(kernel, device.capability)) for kernel in launched]
    print(json.dumps(binaries))


def _binary(kernel: Any, capability: int) -> Binary:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    code = instructions(sass)
    loops = [loop for loop in innermost_loops(code) if any("MMA" in each.text for each in loop)]
    return Binary(
        kernel.metadata.name,
        capability,
        registers,
        stack,
        kernel.metadata.shared,
        counted(code),
        [counted(loop) for loop in loops],
        [fault for loop in loops for fault in overwritten_operands(loop)],
        {name: kind for name, kind in kernel.src.signature.items() if isinstance(kind, str) and kind.startswith("*")},
    )


if __name__ == "__main__":
    main(sys.argv[1])
