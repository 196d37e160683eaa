"""Time and memory of an export at 4 bits whose cache is calibrated, beside a float32 export of the same model.

    python -m research.bench.programs.exporting MODEL --json bench/results/exporting.json

Each export is a process of its own with one thread. They take turns, so that what else the machine does meets all of
them, and times are of the processor: seconds on a clock depend on who else has the cores.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support.apart import JsonFile, run_apart, tell

TURNS = 3
TIME_LIMIT, MEMORY_LIMIT = 2.0, 600_000_000
_LOW = {"kv": 8, "embed": 8}
# Of the checkpoint, but for "4 bits", which is of what `quantize` makes of it.
FLOAT32, FOUR_BITS = "float32", "4 bits"
EXPORTS: dict[str, dict[str, Any]] = {
    FLOAT32: {"kv": 16},
    FOUR_BITS: _LOW,
    "4 bits, rounded on the way": _LOW | {"weights": "4:g32"},
}
_WORKER = """
import json, sys, time
from pathlib import Path
parts, before = {}, 0.0
def part(name):
    global before
    now = time.process_time()
    parts[name], before = round(now - before, 3), now
import diffquant.calib.calibration.kv_cache as calibration
from diffquant.onnx.exporter import check_and_plan_export, write_export
from diffquant.onnx.options import ExportOptions
from diffquant.recipe import Recipe
from diffquant.checkpoints.source import open_source
part("imports")
given = json.loads(sys.argv[3])
options = ExportOptions.parse(given.get("weights", "16"), kv_bits=given["kv"], embed_bits=given.get("embed", 16))
plan = check_and_plan_export(open_source(Path(sys.argv[1])), Path(sys.argv[2]), options, True)
part("checks")
ranges = None
if options.kv_bits < 16:
    ranges = calibration.calibrate_cache(plan.source, Recipe(weights=options.weights))
    part("calibration")
report = write_export(plan, Path(sys.argv[2]), ranges, True)
part("writing")
print(json.dumps({"parts": parts, "cpu_seconds": round(time.process_time(), 3), "bytes": report.bytes_after}))
"""


def main(
    model: Annotated[Path, typer.Argument(help="A plain checkpoint, such as SmolLM2's GGUF.")],
    turns: Annotated[int, typer.Option(min=1, help="Exports of each kind.")] = TURNS,
    file: JsonFile = None,
) -> None:
    """Measure an export at 4 bits with a calibrated cache beside a float32 export."""
    result = measure(model, turns)
    tell(result, file, summary(result))


def measure(model: Path, turns: int) -> dict[str, Any]:
    """Processor seconds, their parts and the largest memory beyond mapped files of each export, turn by turn."""
    with tempfile.TemporaryDirectory() as place:
        low = Path(place) / "low"
        quantize(model, low, Recipe.of(weights="4:g32", rounding="nearest"))
        sources = {name: low if name == FOUR_BITS else model for name in EXPORTS}
        ways = {name: partial(_once, sources[name], Path(place) / "out", EXPORTS[name]) for name in EXPORTS}
        runs = run_in_turns(ways, turns)
    times = {name: median(run["cpu_seconds"] for run in each) for name, each in runs.items()}
    return {
        "environment": describe_environment(),
        "model": model.name,
        "turns": turns,
        "threads": 1,
        "runs": runs,
        "cpu_seconds": times,
        "parts": {name: _medians(run["parts"] for run in each) for name, each in runs.items()},
        "peak_anonymous": {name: max(run["peak_anonymous"] for run in each) for name, each in runs.items()},
        "of_float32": {name: round(seconds / times[FLOAT32], 3) for name, seconds in times.items()},
        "aims": {"of_float32": TIME_LIMIT, "peak_anonymous": MEMORY_LIMIT},
    }


def summary(result: dict[str, Any]) -> str:
    """A line for each export."""
    return "\n".join(
        f"{name}: {seconds:.1f} s of the processor ({_parts_text(result['parts'][name])}), "
        f"{result['of_float32'][name]:.2f} of float32's; "
        f"{result['peak_anonymous'][name] / 1e6:.0f} MB beyond mapped files at most"
        for name, seconds in result["cpu_seconds"].items()
    )


def _once(model: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    one = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return run_apart("-c", _WORKER, model, folder, json.dumps(options), variables=one)


def _medians(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    runs = list(parts)
    return {name: median(run[name] for run in runs) for name in runs[0]}


def _parts_text(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
