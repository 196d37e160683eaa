"""Sweeps whose cells sleep in place of computing, which leaves what it costs to share them."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from diffquant.measure.cells import Cell, SweepPoint
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.sweep.cell import Run, cell_key
from diffquant.measure.task import Task
from diffquant.recipe import Recipe
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Sleep(Task):
    """A task that takes its time; its score is a digest of its name.

    Attributes:
        is_deadly: whether it kills the process that measures it.
    """

    kind: ClassVar = "sleep"
    usage: ClassVar = "sleep"
    columns: ClassVar = ITEMS

    name: str = "sleep"
    seconds: float
    is_deadly: bool = False
    batch_tokens: int = 1

    @classmethod
    def parse(cls, name: str, values: object, batch_tokens: int) -> Self:
        raise cls.make_name_error(name)

    def identity(self) -> JsonObject:
        return {"name": self.name}

    def run(self, model: object, reference: object, progress: Progress) -> TaskResult:
        if self.is_deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return TaskResult(metric="digest", score=int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16), n=1)


@dataclass(frozen=True)
class Sleeper:
    """A model that is nothing."""

    name: str
    device: ClassVar = "cpu"
    peak_weight_bytes: ClassVar = 0

    def key(self, recipe: Recipe) -> JsonObject:
        return {"model": self.name, "recipe": recipe.to_dict()}

    def python_modules(self, recipe: Recipe) -> tuple[str, ...]:
        return (__name__,)

    def copy_to(self, device: str | None) -> Self:
        return self

    def compute_reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> None:
        return None

    def measure(self, task: Task, recipe: Recipe | None, reference: object, progress: Progress) -> TaskResult:
        started = time.monotonic()
        result = task.run(None, None, progress)  # type: ignore[arg-type]
        return replace(result, seconds=time.monotonic() - started, weight_bytes=0, kv_bytes=0.0)


def sleeping_run(folder: Path, batches: int, cells: int, seconds: float, deadly: Collection[str] = ()) -> Run:
    """A sweep of the cells that a folder does not hold yet.

    Args:
        batches, cells: number of models, and of cells over all of them.
        deadly: names of cells, such as "cell 7", that kill the process which measures them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subjects = {Path(name): Sleeper(name) for name in (f"sleeper {number}" for number in range(batches))}
    names = [f"cell {number}" for number in range(cells)]
    tasks = {name: Sleep(name=name, seconds=seconds, is_deadly=name in deadly) for name in names}
    made = []
    for number, (model, sleeper) in enumerate(subjects.items()):
        point = SweepPoint(model, "", 16, "", Recipe(), None)
        for name in names[number::batches]:
            key = cell_key(sleeper, point.recipe, tasks[name], tasks[name].identity())  # type: ignore[arg-type]
            made.append(Cell(point, name, key=key, folder=folder))
    return Run([cell for cell in made if cell.read() is None], subjects, tasks)  # type: ignore[arg-type]


def scores(folder: Path) -> dict[str, float]:
    """Contents of a folder's cells, by the cells' names."""
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return {entry["key"]["task"]["name"]: entry["result"]["score"] for entry in entries if "result" in entry}
