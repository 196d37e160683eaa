"""What `diffquant verify` costs: CPU and wall seconds of each of its parts, its threads waiting as a command's do.

    python -m research.bench.programs.verify smollm2-onnx smollm2-4bit --json bench/results/verify.json

Each turn is a process of its own.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.machine import limit_spinning
from tests.support.apart import JsonFile, run_apart, tell

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
    repeats: Annotated[int, typer.Option(min=1, help="Turns.")] = 1,
    file: JsonFile = None,
) -> None:
    """Time a verification and its parts."""
    result = measure_verify(folder, model, repeats)
    tell(result, file, verify_summary(result))


def measure_verify(folder: Path, model: Path, repeats: int) -> dict[str, Any]:
    """Seconds of each turn and of its parts."""
    limit_spinning()
    return {
        "environment": describe_environment("onnxruntime"),
        "folder": folder.name,
        "folder_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "turns": [_turn(folder, model) for _ in range(repeats)],
    }


def verify_summary(result: dict[str, Any]) -> str:
    """Lines of text: the quickest turn's verdict, its seconds and its parts."""
    turn = min(result["turns"], key=lambda each: each["cpu_seconds"])
    lines = [turn["verdict"], f"{turn['cpu_seconds']:.1f} CPU seconds in {turn['seconds']:.0f} s:"]
    return "\n".join(lines + [f"{part['cpu_seconds']:7.2f}  {part['part']}" for part in turn["parts"]])


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


def _turn(folder: Path, model: Path) -> dict[str, Any]:
    """Seconds of one process."""
    said = run_apart("-c", _TURN, folder, model)
    return {
        "cpu_seconds": said["cpu_seconds"],
        "seconds": said["process_seconds"],
        "verdict": said["verdict"],
        "parts": parts_of(said["called"]),
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
