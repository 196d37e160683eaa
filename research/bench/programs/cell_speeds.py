"""HellaSwag items per second by kind of cell: what each target and each sharing of a scale makes of a sweep's speed.

`python -m research.bench.programs.cell_speeds MODEL --json FILE` writes the speeds of kinds that took turns.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.benchmarks.measuring import describe_environment
from diffquant.checkpoints.source import open_source
from diffquant.measure.sweep.subject import CheckpointSubject
from diffquant.measure.task import batch_tokens_on
from diffquant.measure.tasks import make_tasks
from diffquant.measure.torch_model import TorchModel
from diffquant.recipe import Recipe
from diffquant.support.devices import resolve_dtype
from diffquant.support.files import write_json
from diffquant.support.progress import Progress, report_nothing
from tests.support.apart import JsonFile

FULL = "16 bits"
KINDS = {
    FULL: Recipe(),
    "logits 4:row": Recipe.of(logits="4:row"),
    "logits 4:row:shift": Recipe.of(logits="4:row:shift"),
    "logits 4:tensor": Recipe.of(logits="4:tensor"),
    "logits 4:head": Recipe.of(logits="4:head"),
    "logits 4:pair": Recipe.of(logits="4:pair"),
    "kv 4:row": Recipe.of(kv="4:row"),
    "weights 4:row": Recipe.of(weights="4:row"),
}


def cell_speeds(
    model: Path, dtypes: Sequence[str], items: int, repeats: int, progress: Progress = report_nothing
) -> list[BenchCell]:
    """Cells of HellaSwag items per second on the processor, each beside the model's 16 bits; kinds take turns.

    Every kind but 16 bits is compared with them as in a sweep. Loading a model and running its 16 bits for the
    comparison are not timed.
    """
    (task,) = make_tasks(["hellaswag"], {"limit": items}, batch_tokens_on("cpu"))
    source = open_source(model)
    cells = []
    for number, dtype in enumerate(dtypes):
        subject = CheckpointSubject(source, resolve_dtype(dtype, "cpu"), "cpu")
        speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repeats):
            for place, (kind, recipe) in enumerate(KINDS.items()):
                progress(number + (turn + place / len(KINDS)) / repeats, len(dtypes), f"sweep: {dtype}, {kind}")
                reference = subject.compute_reference(task, recipe, report_nothing)
                running = TorchModel(subject.model(recipe), source.tokenizer)
                started = time.perf_counter()
                task.run(running, reference, report_nothing)
                speeds[kind].append(items / (time.perf_counter() - started))
        workload = f"{source.checkpoint.name}, {items} HellaSwag items, {dtype}, {torch.get_num_threads()} threads"
        cells += [
            BenchCell("sweep", workload, kind, unit="items/s", values=tuple(values), baseline=FULL)
            for kind, values in speeds.items()
        ]
    return cells


def main(
    models: Annotated[list[Path], typer.Argument(help="A .gguf file or a folder, each.")],
    items: Annotated[int, typer.Option(min=1, help="HellaSwag items of each run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 5,
    dtypes: Annotated[str, typer.Option(metavar="LIST", help="Dtypes of the models.")] = "float32,bfloat16",
    file: JsonFile = None,
) -> None:
    """Measure the speed of each kind of a sweep's cells."""
    cells = [cell for model in models for cell in cell_speeds(model, dtypes.split(","), items, repeats)]
    settings = {"items": items, "repeats": repeats, "threads": torch.get_num_threads()}
    result = BenchResult(describe_environment(), settings, tuple(cells))
    for cell in cells:
        if cell.values:
            print(f"{cell.workload}  {cell.path:20} {cell.median:8.2f} items/s  {result.ratio(cell):.2f}")
    if file:
        write_json(file, result.to_dict())


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
