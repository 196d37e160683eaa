"""Kernels compiled for a GPU that is not there, through their own launch code, and what the binaries use.

A test module that defines `launches()`, an iterator of (name, capability, call), asks for `compiled(__file__)`:
in a process of its own, where kernels are not interpreted, each call runs on CPU tensors up to the launch.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT = {80: 166_912, 90: 232_448}


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        kernel: name of its function.
        capability: compute capability, 80 or 90.
        registers: number of registers of a thread.
        stack: bytes of stack of a thread, which is where registers spill to.
        shared: bytes of shared memory of a block.
        opcodes: number of times each machine instruction occurs, by the name before its first dot.
        main_loops: opcodes of each innermost loop that uses the tensor cores.
    """

    kernel: str
    capability: int
    registers: int
    stack: int
    shared: int
    opcodes: dict[str, int]
    main_loops: list[dict[str, int]]

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


def compiled(module_file: str) -> dict[str, list[Binary]]:
    """Kernels that each of a test module's `launches()` launched, by launch name."""
    root = Path(__file__).parents[2]
    module = ".".join(Path(module_file).relative_to(root).with_suffix("").parts)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", __name__, module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    binaries_by_launch = json.loads(done.stdout.splitlines()[-1])
    return {name: [Binary(**binary) for binary in binaries] for name, binaries in binaries_by_launch.items()}


def main(module: str) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from diffquant.kernels import gpu

    absent = _AbsentDevice(lambda capability: GPUTarget("cuda", capability, 32))
    driver.set_active(absent)
    gpu.capability = lambda device: divmod(absent.capability, 10)
    launched: list[Any] = []
    run = jit.JITFunction.run
    jit.JITFunction.run = lambda self, *args, grid, warmup, **options: launched.append(
        run(self, *args, grid=grid, warmup=True, **options)
    )
    binaries = {}
    with torch.no_grad():
        for name, absent.capability, call in importlib.import_module(module).launches():
            launched.clear()
            call()
            binaries[name] = [asdict(_binary(kernel, absent.capability)) for kernel in launched]
    print(json.dumps(binaries))


class _AbsentDevice:
    """Stands in for the driver that Triton asks before it launches.

    The capability is the device's number, so that caches are apart.
    """

    def __init__(self, target_of: Callable[[int], Any]) -> None:
        self.target_of = target_of
        self.capability = 80

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target_of(self.capability)


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
    code = _instructions(sass)
    return Binary(
        kernel.metadata.name,
        capability,
        registers,
        stack,
        kernel.metadata.shared,
        _counted(code),
        [_counted(loop) for loop in _innermost_loops(code) if any("MMA" in text for _, text in loop)],
    )


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Address, and text without predicate, of each instruction."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);", sass, re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines]


def _innermost_loops(code: list[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    index = {address: i for i, (address, _) in enumerate(code)}
    spans = []
    for i, (address, text) in enumerate(code):
        jump = re.match(r"BRA\b.*?(0x[0-9a-f]+)", text)
        if jump and (target := int(jump[1], 16)) < address:
            spans.append((index[target], i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [code[first : last + 1] for first, last in inner]


def _counted(code: list[tuple[int, str]]) -> dict[str, int]:
    return dict(Counter(re.split(r"[.\s]", text, maxsplit=1)[0] for _, text in code))


if __name__ == "__main__":
    main(sys.argv[1])
