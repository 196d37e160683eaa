"""Kernels compiled for a GPU that is not there, through their own launch code, and what the binaries use.

A test module that defines `launches()`, an iterator of (name, capability, call), asks for `compiled(__file__)`:
in a process of its own, where kernels are not interpreted, each call runs on CPU tensors and launches into a driver
that runs nothing (`tests.support.absent_device`). Triton's cache keeps what was compiled.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.absent_device import install
from tests.support.binaries import Binary, read_binary

# Bytes of shared memory that every device has which takes a table's configurations: sm_80's serves the smaller Ampere,
# Ada and consumer Blackwell too.
SHARED_LIMIT = {80: 101_376, 90: 232_448}


def compiled(module_file: str, triton: Path | None = None) -> dict[str, list[Binary]]:
    """Kernels that each of a test module's `launches()` launched, by launch name.

    Args:
        module_file: file of the test module.
        triton: folder of another Triton than the one that is installed.
    """
    binaries_by_launch = answered(__name__, module_file, triton)
    return {name: [Binary(**binary) for binary in binaries] for name, binaries in binaries_by_launch.items()}


def answered(program: str, module_file: str, triton: Path | None = None) -> dict[str, Any]:
    """The JSON that a program prints of a test module's `launches()`, by launch name, in a process of its own."""
    root = Path(__file__).parents[2]
    module = ".".join(Path(module_file).relative_to(root).with_suffix("").parts)
    paths = os.pathsep.join(map(str, (root,) if triton is None else (triton, root)))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", program, module], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


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
            binaries[name] = [asdict(read_binary(kernel, device.capability)) for kernel in launched]
    print(json.dumps(binaries))


if __name__ == "__main__":
    main(sys.argv[1])
