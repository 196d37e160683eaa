"""Every kernel compiled for every kind of card, by the installed Triton and by 3.6.0, through its own launch code.

    python -m tests.kernels.compilations bench/results/compiled-kernels.json

takes about an hour of one core. `make test-triton` fetches Triton 3.6.0.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from diffquant.bench.environment import environment
from diffquant.bench.gpu.binaries import Binary
from diffquant.errors import UsageError
from diffquant.support.files import write_json
from tests.support.kernel_launches import every_kernel
from tests.support.offline import compiled

CAPABILITIES = (80, 86, 89, 90, 100, 120)
TRITONS = {"installed": None, "3.6.0": Path(__file__).parents[2] / "build/triton-3.6.0"}
# Which of the capabilities the process that compiles is to take.
_ONE = "DIFFQUANT_CAPABILITY"


def launches() -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Calls for one card, which `tests.support.offline` makes; what the card cannot run launches nothing."""
    for name, call in every_kernel():
        yield name, int(os.environ[_ONE]), partial(_unless_refused, call)


def _unless_refused(call: Callable[[], object]) -> None:
    with suppress(UsageError):
        call()


def described(binaries: list[Binary]) -> dict[str, object] | None:
    """The largest of what a call's kernels use, and the faults of their main loops; None for a call that is refused."""
    if not binaries:
        return None
    return {
        "kernels": [binary.kernel for binary in binaries],
        "registers": max(binary.registers for binary in binaries),
        "shared": max(binary.shared for binary in binaries),
        "spilling": any(binary.spills_in_a_main_loop() for binary in binaries),
        "overwritten": any(bool(binary.overwritten) for binary in binaries),
    }


def main(file: Path) -> None:
    result: dict[str, object] = {"environment": environment(), "compiled": {}}
    cells: dict[str, dict[str, object]] = {}
    for version, triton in TRITONS.items():
        for capability in CAPABILITIES:
            os.environ[_ONE] = str(capability)
            for name, binaries in compiled(__file__, triton).items():
                cells.setdefault(name, {})[f"{version} sm_{capability}"] = described(binaries)
            result["compiled"] = cells
            write_json(file, result)
            print(f"Triton {version}, sm_{capability}: {len(cells)} calls", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
