"""Time of `quantize` from file to file, beside torchao, which quantizes and packs the same weights in memory.

    python -m research.bench.programs.quantize_peers --json bench/results/quantize-peers.json

torchao is handed weights that are in memory and keeps what it packs there; `quantize` reads the checkpoint, writes the
other one, embeddings included, and has it on the disk when it ends. Rates are of the bytes that are packed, the same
ones for both. They take turns (A B A B), so that what else the machine does falls on
both, and CPU seconds are given too. The checkpoint was just written, so its file is in the page cache. torchao needs an
environment of its own, as `make test-all ONLY=quantizers` sets it up.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import MissingDependencyError
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.reports.tables import align_columns
from diffquant.support.progress import progress_for, report_nothing
from tests.support.apart import JsonFile, clocked, tell
from tests.support.synthetic import sized_diffllama, synthesize

# A group that torchao's layout for processors takes too.
_GROUP = 32
_RECIPE = Recipe.of(weights=f"4:g{_GROUP}")


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the random checkpoint, in bfloat16.")] = 1.36,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 5,
    workplace: Annotated[Path | None, typer.Option(help="Folder with room for twice the checkpoint.")] = None,
    file: JsonFile = None,
) -> None:
    """Time `quantize` from file to file beside torchao in memory."""
    if find_spec("torchao") is None:
        raise MissingDependencyError("torchao is not installed; `make test-all ONLY=quantizers` installs it")
    with tempfile.TemporaryDirectory(dir=workplace) as place:
        synthesize(Path(place) / "source", sized_diffllama(gigabytes), shards=2, progress=progress_for("synthesize"))
        source = open_source(Path(place) / "source")
        weights = packed_weights(source)
        ways = {
            "diffquant quantize": lambda: _quantize(source, Path(place) / "quantized"),
            "torchao in memory": lambda: _torchao(weights),
        }
        times = in_turns(ways, turns)
    packed_bytes = sum(weight.nbytes for weight in weights)
    result = {
        "environment": describe_environment("torchao") | {"threads": torch.get_num_threads()},
        "weights": str(_RECIPE.weights),
        "source_bytes": source.checkpoint.nbytes,
        "packed_bytes": packed_bytes,
        "turns": times,
    }
    tell(result, file, summary(times, packed_bytes))


def packed_weights(source: Source) -> list[Tensor]:
    """The weights that `quantize` packs, in memory."""
    planned = plan_quantization(source, _RECIPE).tensors
    return [source.checkpoint.read(tensor.name).clone() for tensor in planned if tensor.scheme.quantizes]


def in_turns(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of each way's turns, by its name, after one turn that is not counted."""
    times = run_in_turns({name: partial(clocked, run) for name, run in ways.items()}, turns + 1)
    return {
        name: {quantity: [turn[quantity] for turn in of_way[1:]] for quantity in ("seconds", "cpu_seconds")}
        for name, of_way in times.items()
    }


def summary(times: Mapping[str, Mapping[str, list[float]]], nbytes: int) -> str:
    """Text with a line for each way to quantize this many bytes."""
    lines = [
        [
            name,
            f"{median(each['seconds']):.2f} ({min(each['seconds']):.2f}-{max(each['seconds']):.2f})",
            f"{median(each['cpu_seconds']):.2f}",
            f"{nbytes / 1e9 / median(each['seconds']):.3f}",
        ]
        for name, each in times.items()
    ]
    return "\n".join(align_columns(["", "seconds", "CPU seconds", "GB per second"], lines))


def _quantize(source: Source, destination: Path) -> None:
    quantize(source, destination, _RECIPE, progress=report_nothing)
    shutil.rmtree(destination)


@torch.inference_mode()
def _torchao(weights: list[Tensor]) -> list[Any]:
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    return [Int4OpaqueTensor.from_hp(weight, [1, _GROUP]) for weight in weights]


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
