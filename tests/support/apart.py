"""Runs Python in processes of its own, so that neither its imports nor its memory are those of who measures."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import measure_resident_bytes
from diffquant.checkpoints.staging import partial_folder
from diffquant.errors import DiffQuantError
from diffquant.support.files import write_json

# Options that many of the programs have.
JsonFile = Annotated[Path | None, typer.Option("--json", help="Where to write the numbers.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each process; all cores by default.")]
CORES = os.cpu_count() or 1

_POLL_SECONDS = 0.01
_QUANTIZES = """
import json, sys
from pathlib import Path
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
report = quantize(Path(sys.argv[1]), Path(sys.argv[2]), Recipe.of(weights=sys.argv[3], rounding=sys.argv[4]))
print(json.dumps({"seconds": report.seconds, "resumed": report.resumed}))
"""


def tell(result: object, file: Path | None, text: str) -> None:
    """Write a program's numbers where that is asked for, and print what they say."""
    if file:
        write_json(file, result)
    print(text, flush=True)


def run_apart(
    *arguments: object, variables: Mapping[str, str] | None = None, is_to_end: Callable[[], bool] | None = None
) -> dict[str, Any]:
    """Run Python with these arguments to its end.

    Args:
        variables: environment variables; by default those of this process.
        is_to_end: function that is asked again and again, and says when to kill the process.

    Returns:
        "process_seconds" and "cpu_seconds" from start to exit, imports included; "peak_resident", the largest resident
        set in bytes, and "peak_anonymous", that without mapped files; and the fields of the JSON object on the last
        line that it printed, if that is one.

    Raises:
        DiffQuantError: it failed, or ended before it could be killed.
    """
    started, before = time.monotonic(), os.times()
    command = [sys.executable, *map(str, arguments)]
    peak = anonymous = 0
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process:
            while process.poll() is None:
                try:
                    largest, now = measure_resident_bytes(process.pid)
                except OSError:
                    break
                peak, anonymous = max(peak, largest), max(anonymous, now)
                if is_to_end is not None and is_to_end():
                    process.kill()
                    process.wait()
                time.sleep(_POLL_SECONDS)
            printed = process.communicate()[0].splitlines()
        seconds, after = time.monotonic() - started, os.times()
        errors.seek(0)
        said = errors.read().strip()
    expected = 0 if is_to_end is None else -signal.SIGKILL
    if process.returncode != expected:
        raise DiffQuantError(f"a process ended with status {process.returncode}, not {expected}: {said}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    measured = {"process_seconds": seconds, "cpu_seconds": used, "peak_resident": peak, "peak_anonymous": anonymous}
    return measured | (json.loads(printed[-1]) if printed and printed[-1].startswith("{") else {})


def second_call(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of a call behind another one, which brings its caches and tables back and wakes threads."""
    call()
    started = clock()
    call()
    return (clock() - started) * 1e3


def clocked(call: Callable[[], Any]) -> dict[str, Any]:
    """Wall and CPU seconds of a call, and what it gave."""
    wall, cpu = time.monotonic(), time.process_time()
    given = call()
    return {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu, "given": given}


def quantize_once(
    source: Path, destination: Path, weights: str, rounding: str = "nearest", kill_at: int | None = None
) -> dict[str, Any]:
    """Quantize in a process of its own, killed once it has written a number of bytes.

    Returns:
        What `run_apart` measures; "seconds" of `quantize` alone, None if it was killed; and "resumed", the number of
        shards taken over from an earlier run.
    """
    is_to_end = None if kill_at is None else lambda: allocated(partial_folder(destination)) > kill_at
    arguments = (source, destination, weights, rounding)
    return {"seconds": None, "resumed": 0} | run_apart("-c", _QUANTIZES, *arguments, is_to_end=is_to_end)


def idle_memory() -> int:
    """Bytes of anonymous memory of a process that has imported everything and done nothing."""
    script = "import json, diffquant.quantization.quantize, diffquant.benchmarks.measuring as memory\n"
    said = run_apart("-c", f'{script}print(json.dumps({{"idle": memory.measure_resident_bytes()[1]}}))')
    return int(said["idle"])


def allocated(folder: Path) -> int:
    """Bytes on the disk that a folder's tensors take; holes of sparse files do not count."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.safetensors"))
