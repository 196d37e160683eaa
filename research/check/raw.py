"""Raw files as the declarations of pages ask for them, each read once."""

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

from diffquant.evals.stats import Difference, paired_difference
from diffquant.evals.task_result import TaskResult
from diffquant.support.xz import stored
from diffquant.sweep.result import SweepResult, read_sweep
from research.check.page import BENCHED, RESULTS
from research.studies.results import read_json


@cache
def raw(name: str) -> Any:
    """A JSON file of research/results, or of bench/results."""
    file = RESULTS / name
    return read_json(file if stored(file).exists() else BENCHED / name)


def committed(name: str) -> list[str]:
    """Every raw file below research/results that has a name, by its path there, compressed or not."""
    return sorted(str(file.relative_to(RESULTS)).removesuffix(".xz") for file in RESULTS.rglob(f"{name}*"))


@cache
def sweep(folder: str, compared: tuple[tuple[str, str], ...] = ()) -> SweepResult:
    """The sweep of a folder of research/results; `compared` names the checkpoint of each exported folder."""
    return read_sweep(RESULTS / folder / "sweep.json", dict(compared))


def measured(folder: str, model: str, scheme: str, task: str | None = None, target: str | None = None) -> TaskResult:
    """One cell's result. A scheme is as a table has it, "16" or "4:row"; `model` begins its name."""
    found = [
        cell.result
        for cell in sweep(folder).cells
        if cell.point.model.name.startswith(model)
        and cell.point.scheme == scheme
        and task in (None, cell.task)
        and (target is None or cell.point.is_baseline or cell.point.target == target)
    ]
    if len(found) != 1 or found[0] is None:
        raise LookupError(f"research/results/{folder}: {len(found)} cells are {model} {target} {scheme} {task}")
    return found[0]


def values_of(result: TaskResult) -> Sequence[float]:
    if result.values is None:
        raise LookupError("this result keeps no values of its items")
    return result.values


def difference(folder: str, model: str, scheme: str, target: str | None = None) -> Difference:
    """The paired difference of a cell's score from its model's 16 bits."""
    return paired_difference(
        values_of(measured(folder, model, scheme, target=target)), values_of(measured(folder, model, "16"))
    )


def interval(change: Difference) -> tuple[float, float, float]:
    """A mean with its interval, as pages write it."""
    return change.mean, change.low, change.high


def points(change: Difference) -> tuple[float, float, float]:
    """A paired difference with its interval, in points of a hundred."""
    mean, low, high = (100 * x for x in interval(change))
    return mean, low, high


def medians(entries: Sequence[dict[str, Any]], name: str) -> float:
    return float(median(entry[name] for entry in entries))


def recorded(command: str) -> list[str]:
    """Output of the command that begins so, from a run of `python -m research.studies.transcripts`."""
    return next(
        call["output"] for call in raw("transcripts.json")["transcripts"] if call["command"].startswith(command)
    )
