"""Every kernel compiled for every kind of card, by the installed Triton and by 3.6.0, through its own launch code.

    python -m tests.kernels.compilations bench/results/compiled-kernels.json

takes about an hour of one core, and compiles only what FILE (or FILE.xz) does not have of today's kernels: each call
has a digest of the code that was compiled. `make test-all ONLY=triton` fetches Triton 3.6.0.
"""

import json
import lzma
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import UsageError
from diffquant.support.files import write_json
from tests.support.binaries import Binary
from tests.support.kernel_launches import every_kernel
from tests.support.kernel_sources import sources
from tests.support.offline import compiled

CAPABILITIES = (80, 86, 89, 90, 100, 120)
TRITONS = {"installed": None, "3.6.0": Path(__file__).parents[2] / "build/triton-3.6.0"}
# Which of the capabilities the process that compiles is to take, and the calls, as JSON, that it need not make.
_ONE, _MADE = "DIFFQUANT_CAPABILITY", "DIFFQUANT_COMPILED"


def launches() -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Calls for one card, which `tests.support.offline` makes; what the card cannot run launches nothing."""
    made = json.loads(os.environ.get(_MADE, "[]"))
    for name, call in every_kernel():
        if name in made:
            continue
        yield name, int(os.environ[_ONE]), partial(_unless_refused, call)


def _unless_refused(call: Callable[[], object]) -> None:
    with suppress(UsageError):
        call()


def described(binaries: list[Binary], source: str | None) -> dict[str, object] | None:
    """The largest of what a call's kernels use, and the faults of their main loops; None for a call that is refused."""
    if not binaries:
        return None
    return {
        "source": source,
        "kernels": [binary.kernel for binary in binaries],
        "registers": max(binary.registers for binary in binaries),
        "shared": max(binary.shared for binary in binaries),
        "spilling": any(binary.spills_in_a_main_loop() for binary in binaries),
        "overwritten": any(bool(binary.overwritten) for binary in binaries),
    }


def earlier(file: Path) -> dict[str, dict[str, Any]]:
    """What a file says of calls that were compiled before, by call and card; it goes on from FILE before FILE.xz."""
    packed = file.with_name(f"{file.name}.xz")
    if file.exists():
        compiled_before = json.loads(file.read_text(encoding="utf-8"))
    elif packed.exists():
        compiled_before = json.loads(lzma.decompress(packed.read_bytes()))
    else:
        return {}
    cells: dict[str, dict[str, Any]] = compiled_before["compiled"]
    return cells


def todays(triton: Path | None, capability: int) -> dict[str, str | None]:
    """The digest of what each call would compile now, None for one that is refused."""
    os.environ[_ONE], os.environ[_MADE] = str(capability), "[]"
    return sources(__file__, triton)


def recorded(cells: dict[str, dict[str, Any]], where: str) -> dict[str, str | None]:
    """The digest of what a record has of each call for one card, None for one that was refused."""
    return {
        name: by_card[where] and by_card[where].get("source", "") for name, by_card in cells.items() if where in by_card
    }


def main(file: Path) -> None:
    result: dict[str, object] = {"environment": describe_environment(), "compiled": {}}
    cells = earlier(file)
    for version, triton in TRITONS.items():
        for capability in CAPABILITIES:
            where = f"{version} sm_{capability}"
            now, before = todays(triton, capability), recorded(cells, where)
            os.environ[_MADE] = json.dumps([name for name in now if name in before and now[name] == before[name]])
            made = compiled(__file__, triton)
            for name, binaries in made.items():
                cells.setdefault(name, {})[where] = described(binaries, now[name])
            result["compiled"] = cells = {name: by_card for name, by_card in cells.items() if name in now}
            write_json(file, result)
            said = f"Triton {version}, sm_{capability}: {len(made)} of {len(cells)} calls anew"
            print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
