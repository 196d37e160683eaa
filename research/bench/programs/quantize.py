"""Time and memory of quantizing a large checkpoint, and its survival of `kill -9`.

    python -m research.bench.programs.quantize --gigabytes 6 --json bench/results/quantize-6gb.json
    python -m research.bench.programs.quantize --preset motif-2-12.7b --shards 6 --weights 4:g128 --json m.json

Makes a random checkpoint (or takes one), times `inspect` of it, quantizes it in a process of its own whose memory is
watched, then again with a kill in the middle and a second start, and compares the two outputs.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import ToleranceError
from diffquant.support.progress import progress_for
from tests.support.apart import JsonFile, allocated, idle_memory, quantize_once, run_apart, tell
from tests.support.synthetic import PRESETS, preset, sized_diffllama, synthesize

MEMORY_LIMIT = 10**9
INSPECT_LIMIT = 3.0
_INSPECTIONS = 5


def main(
    source: Annotated[Path | None, typer.Option(help="A checkpoint to use instead of a random one.")] = None,
    gigabytes: Annotated[float, typer.Option(help="Size of the random one.")] = 6.0,
    model: Annotated[str | None, typer.Option("--preset", help=f"A random one of {', '.join(PRESETS)}.")] = None,
    shards: Annotated[int, typer.Option(min=1, help="Files of the random one.")] = 4,
    weights: Annotated[str, typer.Option(help="Scheme, such as 4:g32.")] = "4:g32",
    workplace: Annotated[Path | None, typer.Option(help="Folder with room for twice the checkpoint.")] = None,
    file: JsonFile = None,
) -> None:
    """Measure time and memory of quantizing a large checkpoint, and its survival of `kill -9`."""
    with tempfile.TemporaryDirectory(dir=workplace) as place:
        checkpoint = source or Path(place) / "source"
        if source is None:
            config = preset(model) if model else sized_diffllama(gigabytes)
            synthesize(checkpoint, config, shards, progress_for("synthesize"))
        result = measure_quantizing(checkpoint, Path(place), weights)
    tell(result, file, quantizing_summary(result))
    _require(result)


def measure_quantizing(source: Path, place: Path, weights: str) -> dict[str, Any]:
    """Inspect a checkpoint, quantize it whole, then killed and resumed, and compare."""
    inspected = [run_apart("-m", "diffquant", "inspect", source) for _ in range(_INSPECTIONS)]
    uninterrupted = quantize_once(source, place / "whole", weights)
    output_bytes = allocated(place / "whole")
    killed = quantize_once(source, place / "resumed", weights, kill_at=output_bytes * 6 // 10)
    resumed = quantize_once(source, place / "resumed", weights)
    source_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    return {
        "environment": describe_environment(),
        "model_type": json.loads((source / "config.json").read_text())["model_type"],
        "weights": weights,
        "source_bytes": source_bytes,
        "source_files": len(list(source.glob("*.safetensors"))),
        "output_bytes": output_bytes,
        "inspect_seconds": [run["process_seconds"] for run in inspected],
        "anonymous_bytes_of_imports": idle_memory(),
        "gigabytes_per_second": round(source_bytes / 1e9 / uninterrupted["seconds"], 3),
        "whole": uninterrupted,
        "killed": killed,
        "resumed": resumed,
        "byte_identical": digests(place / "whole") == digests(place / "resumed"),
    }


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder."""
    digest_by_name = {}
    for file in folder.iterdir():
        with file.open("rb") as stream:
            digest_by_name[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digest_by_name


def quantizing_summary(result: dict[str, Any]) -> str:
    """Four lines of text: speed, memory, whether the resumed output is the same, and the time of `inspect`."""
    uninterrupted, resumed = result["whole"], result["resumed"]
    return "\n".join(
        [
            f"{result['source_bytes'] / 1e9:.2f} GB in {result['source_files']} files at {result['weights']}: "
            f"{uninterrupted['seconds']:.1f} s, {result['gigabytes_per_second']:.2f} GB/s, "
            f"{uninterrupted['cpu_seconds']:.1f} s of processor time with imports "
            f"({result['environment']['cores']} cores, {result['environment']['cpu']})",
            f"peak memory beyond mapped files {uninterrupted['peak_anonymous'] / 1e6:.0f} MB, "
            f"{result['anonymous_bytes_of_imports'] / 1e6:.0f} MB of it imports; "
            f"with the mapped files {uninterrupted['peak_resident'] / 1e9:.2f} GB",
            f"killed after {result['killed']['process_seconds']:.1f} s, resumed with {resumed['resumed']} finished "
            f"shards in {resumed['seconds']:.1f} s, outputs {'identical' if result['byte_identical'] else 'DIFFER'}",
            f"inspect {median(result['inspect_seconds']):.2f} s, median of {len(result['inspect_seconds'])}",
        ]
    )


def _require(result: dict[str, Any]) -> None:
    """Check that memory and `inspect` stayed in their limits and the resumed output is the same.

    Raises:
        ToleranceError: it did not, or is not.
    """
    peak = max(result[run]["peak_anonymous"] for run in ("whole", "killed", "resumed"))
    if peak > MEMORY_LIMIT:
        raise ToleranceError(f"peak memory beyond mapped files was {peak} bytes; the limit is {MEMORY_LIMIT}")
    inspecting = median(result["inspect_seconds"])
    if inspecting > INSPECT_LIMIT:
        raise ToleranceError(f"inspect took {inspecting:.2f} s; the limit is {INSPECT_LIMIT} s")
    if not result["byte_identical"]:
        raise ToleranceError("the output of the killed and resumed run differs from that of the whole run")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
