"""Time and memory of quantizing a checkpoint by each rounding.

    python -m research.bench.programs.roundings MODEL.gguf --json bench/results/quantize-roundings.json

Each has a process of its own, all cores, and the text, tokens and window that it takes by itself. One run each.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.files import write_json
from tests.support.apart import JsonFile, quantize_once


def main(
    source: Annotated[Path, typer.Argument(help="A checkpoint.")],
    roundings: Annotated[str, typer.Option(help="Names, separated by commas.")] = "nearest,mse,gptq,tuned",
    weights: Annotated[str, typer.Option(help="Scheme, such as 4:g32.")] = "4:g32",
    file: JsonFile = None,
) -> None:
    """Measure time and memory of quantizing a checkpoint by each rounding, in a process of its own."""
    # Before the runs, which are a load of their own.
    here, runs = describe_environment(), {}
    for name in roundings.split(","):
        with tempfile.TemporaryDirectory() as place:
            runs[name] = quantize_once(source, Path(place) / "out", weights, name)
        run = runs[name]
        print(f"{name}: {run['process_seconds']:.1f} s, {run['peak_anonymous'] / 1e6:.0f} MB beyond mapped files")
        if file:
            write_json(file, {"environment": here, "model": source.name, "weights": weights, "roundings": runs})


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
