"""Cold start: time from the shell to the answer of `diffquant inspect`, beside that of importing torch alone.

    python -m research.bench.programs.cold_start FOLDER --json bench/results/cold-start.json

Processes take turns. Processor time is kept beside time on the clock: other work on the machine does not count in it.
"""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from tests.support.apart import JsonFile, run_apart, tell

_TORCH, _INSPECT, _TRANSFORMERS = "import torch", "diffquant inspect", "import transformers"


def main(
    model: Annotated[Path, typer.Argument(help="A small checkpoint folder.")],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 10,
    file: JsonFile = None,
) -> None:
    """Time `diffquant inspect` from start to exit, beside `import torch`."""
    result = measure_cold_start(model, repeats)
    tell(result, file, cold_start_summary(result))


def measure_cold_start(model: Path, repeats: int) -> dict[str, Any]:
    """Times of each process's turns, the first of each left out, and their ratios."""
    commands = {
        _TORCH: ["-c", _TORCH],
        _INSPECT: ["-m", "diffquant", "inspect", str(model)],
        _TRANSFORMERS: ["-c", "from transformers import AutoModelForCausalLM"],
    }
    ran = run_in_turns({name: partial(run_apart, *arguments) for name, arguments in commands.items()}, repeats + 1)
    turns = {
        name: [{"seconds": run["process_seconds"], "cpu_seconds": run["cpu_seconds"]} for run in runs[1:]]
        for name, runs in ran.items()
    }
    return {
        "environment": describe_environment(),
        "model": model.name,
        "turns": turns,
        "ratio": _ratio(turns, "seconds"),
        "cpu_ratio": _ratio(turns, "cpu_seconds"),
    }


def cold_start_summary(result: dict[str, Any]) -> str:
    """Text with the medians of each process, and the ratio of `inspect` to `import torch`."""
    lines = [
        f"{name}: {median(turn['seconds'] for turn in turns):.2f} s, "
        f"{median(turn['cpu_seconds'] for turn in turns):.2f} s of processor time"
        for name, turns in result["turns"].items()
    ]
    ratio = f"{_INSPECT} takes {result['ratio']:.2f} times as long as {_TORCH}"
    return "\n".join([*lines, f"{ratio}, {result['cpu_ratio']:.2f} times its processor time"])


def _ratio(turns: dict[str, list[dict[str, float]]], quantity: str) -> float:
    """Median of the ratios of turns that followed one another."""
    side_by_side = zip(turns[_INSPECT], turns[_TORCH], strict=True)
    return median(ours[quantity] / torch[quantity] for ours, torch in side_by_side)


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
