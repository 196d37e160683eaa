"""Faults planted in the export of a trained model, each of which `diffquant verify` has to refuse.

    python -m studies.planted_faults EXPORT CHECKPOINT --json bench/results/planted-faults.json

`tests/export/test_planted_faults.py` plants many faults in small models with random weights. In a model of many layers
one of them weighs less, so four are planted in the export given, in copies whose digests agree, and the sound export is
verified beside them. Each result is on the disk before the next fault is planted.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from diffquant.bench.environment import environment
from diffquant.errors import ToleranceError, UsageError
from diffquant.export import verify
from diffquant.export.manifest import read_manifest
from diffquant.export.verification.report import Verification
from diffquant.support.files import write_atomically
from diffquant.support.progress import progress_for
from tests.support.planted import END, PlantedExport, emptied, present, weight, with_rows

# The layer of the faults that are in one layer.
LAYER = 10
_ATTENTION = "DifferentialAttention"


def cache_emptied(export: PlantedExport) -> None:
    """Empty one layer's cache after every call."""
    for part in ("key", "value"):
        emptied(export, present(part, LAYER))


def row_overwritten(export: PlantedExport) -> None:
    """Overwrite the cache's second row with its first in all layers."""
    for output in export.model.graph.output:
        if output.name.startswith("present."):
            with_rows(export, output.name, (0, 1), (0, 1), (2, END))


def scales_larger(export: PlantedExport) -> None:
    """Multiply the scales of one matrix by 1.05."""
    export.change(f"{weight('up', LAYER)}_scale", lambda scales: scales * np.float32(1.05))


def pairs_swapped(export: PlantedExport) -> None:
    """Swap the queries of one layer's first two pairs."""
    attention = next(node for node in export.model.graph.node if node.op_type == _ATTENTION)
    pairs = next(attribute.i for attribute in attention.attribute if attribute.name == "num_pairs")
    order = [1, 0, *range(2, pairs)]
    for part in ("codes", "scale"):
        export.change(f"{weight('q', LAYER)}_{part}", lambda rows: rows.reshape(pairs, -1)[order].reshape(rows.shape))


FAULTS: dict[str, Callable[[PlantedExport], None] | None] = {
    "none": None,
    "one layer's cache emptied after every call": cache_emptied,
    "a cache row overwritten in all layers": row_overwritten,
    "one matrix's scales x 1.05": scales_larger,
    "swapped query pairs": pairs_swapped,
}


def main(
    export: Annotated[Path, typer.Argument(help="Exported folder of 4-bit weights.")],
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint that it was made of.")],
    file: Annotated[Path, typer.Option("--json", help="Where the numbers go.")],
    threads: Annotated[int, typer.Option(help="Threads of ONNX Runtime; 0 takes all cores.")] = 0,
) -> None:
    """Verify an export as it is and with each fault."""
    model = {"export": export.name, **read_manifest(export).files.to_dict()}
    results: dict[str, Any] = {}
    if file.exists():
        former = json.loads(file.read_text(encoding="utf-8"))
        if former["model"] != model:
            raise UsageError(f"{file} is of another export; name another file with --json")
        results = former["results"]
    progress = progress_for("faults")
    for number, (name, edit) in enumerate(FAULTS.items()):
        progress(number, len(FAULTS), name)
        if name not in results:
            results[name] = verified_with(edit, export, checkpoint, threads)
            written = {"environment": environment("onnxruntime"), "model": model, "layer": LAYER, "results": results}
            write_atomically(file, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
        print(f"{name}: {'refused: ' if results[name]['refused'] else ''}{results[name]['verdict']}", flush=True)
    progress(len(FAULTS), len(FAULTS), "done")


def verified_with(
    edit: Callable[[PlantedExport], None] | None, export: Path, checkpoint: Path, threads: int
) -> dict[str, Any]:
    """What `verify` says of a copy with a fault in it, with the worst value of each route as a part of its limit."""
    with tempfile.TemporaryDirectory() as folder:
        planted = PlantedExport.copy(export, Path(folder) / export.name)
        if edit is not None:
            edit(planted)
            planted.save()
        try:
            verification = verify(planted.folder, checkpoint, threads=threads)
        except ToleranceError as error:
            if not isinstance(error.report, Verification):
                raise
            verification = error.report
    return {
        "refused": not verification.passed,
        "verdict": "within tolerance" if verification.passed else verification.divergence(),
        "positions": verification.positions,
        "routes": {
            f"{route.session}, {route.name}": {
                "stages": max((each.ratio for each in (*route.typical, *route.largest)), default=None),
                "logits": route.logits.ratio,
                "against prefill": route.against_prefill.ratio,
            }
            for route in verification.routes
        },
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
