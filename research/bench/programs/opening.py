"""Opening a GGUF file: time to read all of its tensors, beside transformers' own loader.

    python -m research.bench.programs.opening MODEL.gguf --json bench/results/opening.json

Each turn is a process of its own, ours and transformers' by turns; imports are not counted.
"""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from tests.support.apart import JsonFile, run_apart, tell

_OURS = """
import json, sys, time
from pathlib import Path
import torch
from diffquant.checkpoints.source import open_source
started = time.monotonic()
source = open_source(Path(sys.argv[1]))
opened = time.monotonic()
for name in source.checkpoint.tensors:
    source.checkpoint.read(name)
read = time.monotonic()
"""
_LIBRARY = """
import json, sys, time
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
path = Path(sys.argv[1])
dense = {"dtype": torch.float32}
try:
    from transformers import GgufConfig
    # Newer versions keep a file's blocks packed where a kernel is installed.
    dense["quantization_config"] = GgufConfig(dequantize=True)
except ImportError:
    pass
started = opened = time.monotonic()
AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **dense)
read = time.monotonic()
"""
_REPORT = """
print(json.dumps({"open_seconds": opened - started, "seconds": read - started}))
"""


def main(
    model: Annotated[Path, typer.Argument(help="A .gguf file of a llama.")],
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
    file: JsonFile = None,
) -> None:
    """Time opening a GGUF file and reading all its tensors."""
    result = measure_opening(model, repeats)
    tell(result, file, opening_summary(result))


def measure_opening(model: Path, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of our loader's turns and of transformers', and their ratio."""
    programs = {"ours": _OURS, "transformers": _LIBRARY}
    ways = {name: partial(run_apart, "-c", program + _REPORT, model) for name, program in programs.items()}
    turns = run_in_turns(ways, repeats)
    return {
        "environment": describe_environment("gguf"),
        "model": model.name,
        "file_bytes": model.stat().st_size,
        **turns,
        "ratio": median(theirs["seconds"] / ours["seconds"] for ours, theirs in zip(*turns.values(), strict=True)),
    }


def opening_summary(result: dict[str, Any]) -> str:
    """Line of text with the medians."""

    def median_of(loader: str, quantity: str) -> float:
        return float(median(turn[quantity] for turn in result[loader]))

    return (
        f"{result['model']}: opened in {median_of('ours', 'open_seconds'):.2f} s, opened and all tensors read in "
        f"{median_of('ours', 'seconds'):.2f} s, peak {median_of('ours', 'peak_resident') / 1e6:.0f} MB; transformers "
        f"{median_of('transformers', 'seconds'):.2f} s, "
        f"peak {median_of('transformers', 'peak_resident') / 1e6:.0f} MB: "
        f"{result['ratio']:.1f} times as long"
    )


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
