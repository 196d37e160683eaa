"""`python -m research.bench`: the bench of kernels, and sections that run whole programs beside other libraries.

python -m research.bench quantize export -o bench-output
"""

from pathlib import Path
from typing import Annotated

import typer

from diffquant.benchmarks.run import PARTS, BenchOptions, require_complete, run_bench, write_bench_outputs
from diffquant.data import smollm2_file
from diffquant.errors import MissingDependencyError
from diffquant.support.names import split_numbers
from diffquant.support.program import run_program
from diffquant.support.progress import progress_for
from research.bench import peers  # noqa: F401  registers further implementations
from research.bench.sections import program_sections


def main(
    sections: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join([*PARTS, *program_sections(())])}; all by default.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for tables, plots and report.")] = Path(
        "bench-output"
    ),
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="Folder or .gguf file for generate and sweep; SmolLM2 by default.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers that share a sweep, such as 1,2.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; the device's default if empty.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Number of times that each path is measured.")] = 5,
) -> None:
    """Measure kernels, and whole programs beside other libraries."""
    checkpoints = checkpoint or _demo_checkpoints()
    counts = split_numbers("workers", workers, "1,2") if workers else ()
    known = PARTS | program_sections(checkpoints, counts)
    options = BenchOptions(tuple(sections or known), device, dtype=dtype, repeats=repeats)
    settings = {"checkpoints": [path.name for path in checkpoints], "workers": list(counts)}
    result = run_bench(options, known, output, progress_for("bench"), settings)
    for path in write_bench_outputs(result, output):
        print(path)
    require_complete(result)


def _demo_checkpoints() -> list[Path]:
    """SmolLM2's weights, if the package that has them is installed."""
    try:
        return [smollm2_file()]
    except MissingDependencyError:
        return []


if __name__ == "__main__":
    run_program(main)
