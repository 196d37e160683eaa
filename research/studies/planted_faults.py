"""Faults planted in the export of a trained model, each of which `diffquant verify` has to refuse.

    python -m research.studies.planted_faults EXPORT CHECKPOINT --json research/results/planted-faults.json

`tests/export/test_planted_faults.py` plants many faults in small models with random weights. In a model of many layers
one of them weighs less, so four are planted in the export given, in copies whose digests agree, and the sound export is
verified beside them. Each result is on the disk before the next fault is planted.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import ToleranceError, UsageError
from diffquant.onnx import verify
from diffquant.onnx.manifest import read_manifest
from diffquant.onnx.verification.report import Verification
from diffquant.support.files import find_file_or_xz, write_json
from diffquant.support.progress import progress_for
from research.studies.results import read_json
from tests.support.planted import PlantedExport, cache_emptied, pairs_swapped, row_overwritten, scales_larger

SOUND = "none"
# Faults by name; those that are in one layer are in the one given.
FAULTS: dict[str, Callable[[PlantedExport, int], None]] = {
    "one layer's cache emptied after every call": cache_emptied,
    "a cache row overwritten in all layers": lambda export, _layer: row_overwritten(export),
    "one matrix's scales x 1.05": scales_larger,
    "swapped query pairs": pairs_swapped,
}


def main(
    export: Annotated[Path, typer.Argument(help="Exported folder of 4-bit weights.")],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint that it was made of.")],
    file: Annotated[Path, typer.Option("--json", help="Where the numbers go.")],
    layer: Annotated[int, typer.Option(help="Layer of the faults that are in one layer.")] = 10,
    threads: Annotated[int, typer.Option(help="Threads of ONNX Runtime; 0 takes all cores.")] = 0,
) -> None:
    """Verify an export as it is and with each fault."""
    model = {"export": export.name, "layer": layer, **read_manifest(export).files.to_dict()}
    results: dict[str, Any] = {}
    if find_file_or_xz(file).exists():
        former = read_json(file)
        if former["model"] != model:
            raise UsageError(f"{file} is of another export or layer; name another file with --json")
        results = former["results"]
    progress = progress_for("faults")
    names = [SOUND, *FAULTS]
    for number, name in enumerate(names):
        progress(number, len(names), name)
        if name not in results:
            results[name] = verified_with(name, layer, export, checkpoint, threads)
            written = {"environment": describe_environment("onnxruntime"), "model": model, "results": results}
            write_json(file, written)
        print(f"{name}: {'refused: ' if results[name]['refused'] else ''}{results[name]['verdict']}", flush=True)
    progress(len(names), len(names), "done")


def verified_with(fault: str, layer: int, export: Path, checkpoint: Path, threads: int = 0) -> dict[str, Any]:
    """Run `verify` on a copy with a fault in it, and give the worst value of each route as a part of its limit."""
    with tempfile.TemporaryDirectory() as folder:
        planted = PlantedExport.copy(export, Path(folder) / export.name)
        if fault != SOUND:
            FAULTS[fault](planted, layer)
            planted.save()
        try:
            verification = verify(planted.folder, checkpoint, threads=threads)
        except ToleranceError as error:
            if not isinstance(error.result, Verification):
                raise
            verification = error.result
    return {
        "refused": not verification.passed,
        "verdict": "within tolerance" if verification.passed else verification.describe_first_failure(),
        "positions": verification.positions,
        "routes": {
            f"{route.session}, {route.name}": {
                "stages": max((each.ratio for each in (*route.typical, *route.largest)), default=None),
                "logits": route.logits.ratio if route.logits else None,
                "against prefill": route.against_prefill.ratio if route.against_prefill else None,
            }
            for route in verification.routes
        },
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
