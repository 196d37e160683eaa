"""HellaSwag items a second by kind of cell: what each target and each sharing of a scale makes of a sweep's speed."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from diffquant.bench.cells import BenchCell
from diffquant.evals.defaults import batch_tokens_on
from diffquant.evals.tasks import make_tasks
from diffquant.recipe import Recipe
from diffquant.source.source import open_source
from diffquant.support.devices import resolve_dtype
from diffquant.support.progress import Progress, silent
from diffquant.sweep.session import CheckpointSubject, Setup

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
    model: Path, dtypes: Sequence[str], items: int, repeats: int, progress: Progress = silent
) -> list[BenchCell]:
    """Cells of HellaSwag items a second on the processor, each beside the model's 16 bits; kinds take turns.

    Every kind but 16 bits is compared with them as in a sweep. Loading a model and running its 16 bits for the
    comparison are not timed.
    """
    (task,) = make_tasks(["hellaswag"], {"limit": items}, batch_tokens_on("cpu"))
    source = open_source(model)
    cells = []
    for number, dtype in enumerate(dtypes):
        session = CheckpointSubject(source, Setup(resolve_dtype(dtype, "cpu"), "cpu", "auto")).open()
        reference = session.reference(task, silent)
        speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repeats):
            for place, (kind, recipe) in enumerate(KINDS.items()):
                progress(number + (turn + place / len(KINDS)) / repeats, len(dtypes), f"sweep: {dtype}, {kind}")
                session.model(recipe)
                started = time.perf_counter()
                session.run(task, recipe, None if kind == FULL else reference, silent)
                speeds[kind].append(items / (time.perf_counter() - started))
        workload = f"{source.checkpoint.name}, {items} HellaSwag items, {dtype}, {torch.get_num_threads()} threads"
        cells += [
            BenchCell("sweep", workload, kind, unit="items/s", values=tuple(values), baseline=FULL)
            for kind, values in speeds.items()
        ]
    return cells
