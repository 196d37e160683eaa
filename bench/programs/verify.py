"""What `diffquant verify` costs: CPU and wall seconds of each of its parts, and of the whole by how its threads wait.

    python -m diffquant.bench.programs.verify smollm2-onnx smollm2-4bit --json bench/results/verify.json

Each turn is a process of its own, by turns with threads that wait as the command has them wait and as OpenMP does by
itself, which is what `diffquant.verify` in Python gets.
"""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.bench.environment import environment
from diffquant.errors import DiffQuantError
from diffquant.support.files import write_json
from diffquant.support.waits import wait_briefly

# Progress says of these that they begin, of all other parts that they are done.
_BEGINNING = ("opening it", "what rounding explains", "reading the folder and its checkpoint")

_TURN = """
import json, sys, time
import diffquant
def now(what):
    return what, time.process_time(), time.monotonic()
called = [now("")]
verification = diffquant.verify(sys.argv[1], sys.argv[2], progress=lambda done, total, what: called.append(now(what)))
print(json.dumps({"called": called, "verdict": verification.verdict()}))
"""


def main(
    folder: Annotated[Path, typer.Argument(help="Folder that `export` wrote.")],
    model: Annotated[Path, typer.Argument(help="Checkpoint that it was exported from.")],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 2,
    file: Annotated[Path | None, typer.Option("--json", help="Where to write the numbers.")] = None,
) -> None:
    """Time a verification and its parts."""
    result = measure_verify(folder, model, repeats)
    if file:
        write_json(file, result)
    typer.echo(verify_summary(result))


def measure_verify(folder: Path, model: Path, repeats: int) -> dict[str, Any]:
    """Seconds of the turns with either way of waiting, and the ratio of their CPU seconds."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)
    plain = dict(os.environ)
    wait_briefly()
    brief, long = [], []
    for _ in range(repeats):
        brief.append(_turn(folder, model, dict(os.environ)))
        long.append(_turn(folder, model, plain))
    return {
        "environment": environment("onnxruntime"),
        "folder": folder.name,
        "folder_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "brief_waits": brief,
        "long_waits": long,
        "cpu_ratio": median(other["cpu_seconds"] / own["cpu_seconds"] for own, other in zip(brief, long, strict=True)),
    }


def verify_summary(result: dict[str, Any]) -> str:
    """Lines of text: the whole, then the parts of the first turn."""
    own, other = result["brief_waits"][0], result["long_waits"][0]
    lines = [
        own["verdict"],
        f"{own['cpu_seconds']:.0f} CPU seconds in {own['seconds']:.0f} s; with OpenMP's own waiting "
        f"{other['cpu_seconds']:.0f} in {other['seconds']:.0f} s, {result['cpu_ratio']:.1f} times as many",
    ]
    lines += [f"{part['cpu_seconds']:7.2f}  {part['part']}" for part in own["parts"]]
    return "\n".join(lines)


def parts_of(called: list[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Seconds between one call of the progress and the next, and what they were of; equal parts that follow are one.

    Args:
        called: what each call said, with the process's CPU seconds and the clock then.
    """
    parts: list[dict[str, Any]] = []
    for (begun, cpu, clock), (done, later_cpu, later_clock) in pairwise(called):
        name = begun if begun.endswith(_BEGINNING) else done
        if not parts or parts[-1]["part"] != name:
            parts.append({"part": name, "cpu_seconds": 0.0, "seconds": 0.0})
        parts[-1]["cpu_seconds"] += later_cpu - cpu
        parts[-1]["seconds"] += later_clock - clock
    return parts


def _turn(folder: Path, model: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Seconds of one process with these environment variables.

    Raises:
        DiffQuantError: the process failed.
    """
    started, before = time.monotonic(), os.times()
    done = subprocess.run(
        [sys.executable, "-c", _TURN, str(folder), str(model)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.monotonic() - started, os.times()
    if done.returncode:
        raise DiffQuantError(f"verifying {folder} failed: {done.stderr.strip().splitlines()[-1]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return {
        "cpu_seconds": after.children_user + after.children_system - before.children_user - before.children_system,
        "seconds": seconds,
        "verdict": said["verdict"],
        "parts": parts_of(said["called"]),
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
