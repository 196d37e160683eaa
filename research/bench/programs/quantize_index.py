"""Memory of planning the index of a model too large for the disk, and of quantizing a part of it, whole and resumed.

    python -m research.bench.programs.quantize_index --json bench/results/quantize-motif-3.json

Names and shapes are the published index's; the tensors are holes in sparse files, which read as zeros. All of it is
opened, inspected and planned. As many layers as are asked for, with embedding and head, are quantized whole, then
with a kill in the middle and a second start.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import ToleranceError
from diffquant.support.files import write_json
from research.bench.programs.quantize import MEMORY_LIMIT, measure_quantizing, quantizing_summary
from tests.support.apart import JsonFile, run_apart
from tests.support.synthetic import preset, write_holes

_MODEL = "motif-3"
# As many as the release has.
_SHARDS = 155
_PLANNER = """
import json, sys, time
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.checkpoints.source import open_source
started = time.monotonic()
source = open_source(sys.argv[1])
opened = time.monotonic()
plan = plan_quantization(source, Recipe.of(weights=sys.argv[2]))
print(json.dumps({
    "open_seconds": opened - started, "plan_seconds": time.monotonic() - opened,
    "tensors": len(source.checkpoint.tensors), "parameters": source.weight_count, "packed": len(plan.schemes),
    "bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "packed_bits": plan.packed_bits,
}))
"""


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers to quantize, from the first on.")] = 3,
    weights: Annotated[str, typer.Option(help="Scheme, such as 4:g32.")] = "4:g128",
    workplace: Annotated[Path | None, typer.Option(help="Folder with room for twice the quantized layers.")] = None,
    file: JsonFile = None,
) -> None:
    """Plan an index too large for the disk, and quantize some of its layers, whole and resumed."""
    with tempfile.TemporaryDirectory(dir=workplace) as place:
        index, part = Path(place) / "index", Path(place) / "part"
        write_holes(index, preset(_MODEL), _SHARDS)
        write_holes(part, preset(_MODEL) | {"num_hidden_layers": layers}, 4)
        plan = plan_once(index, weights)
        result: dict[str, Any] = {
            "environment": describe_environment(),
            "model": _MODEL,
            "data": "holes of sparse files, which read as zeros",
            "index": plan,
            "layers": layers,
            "part": measure_quantizing(part, Path(place), weights),
        }
    if file:
        write_json(file, result)
    print(
        f"{plan['tensors']} tensors with {plan['parameters']} parameters, {plan['bytes_before'] / 1e9:.1f} GB: opened "
        f"in {plan['open_seconds']:.1f} s and planned in {plan['plan_seconds']:.1f} s, "
        f"{plan['bytes_after'] / 1e9:.1f} GB at {weights}; peak memory {plan['peak_resident'] / 1e6:.0f} MB\n"
        f"{quantizing_summary(result['part'])}"
    )
    _require(result)


def plan_once(source: Path, weights: str) -> dict[str, Any]:
    """Open and plan in a process of its own: what it says, and what `run_apart` measures."""
    return run_apart("-c", _PLANNER, source, weights)


def _require(result: dict[str, Any]) -> None:
    """Check that all stayed within a gigabyte, and that the resumed output is the same.

    Raises:
        ToleranceError: it did not, or is not.
    """
    runs = [result["index"], *(result["part"][name] for name in ("whole", "killed", "resumed"))]
    peak = max(run["peak_anonymous"] for run in runs)
    if peak > MEMORY_LIMIT:
        raise ToleranceError(f"peak memory beyond mapped files was {peak} bytes; the limit is {MEMORY_LIMIT}")
    if not result["part"]["byte_identical"]:
        raise ToleranceError("the output of the killed and resumed run differs from that of the whole run")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
