"""Raw files of results: read by name, each once, and listed on the page that they are used by."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.result import SweepResult, read_sweep
from diffquant.support.files import find_file_or_xz, read_text_or_xz
from research.studies.results import read_json

# The folder that all raw files are below; tests set another one.
ROOT = Path(__file__).parents[2]
RESULTS, BENCHED, TRAININGS = "research/results", "bench/results", "research/figure8/results"


def folder(name: str = "") -> Path:
    """A folder of research/results."""
    return ROOT / RESULTS / name


@cache
def raw(name: str) -> Any:
    """A JSON file of research/results, or of bench/results, without the ".xz" behind its name."""
    file = folder(name)
    return read_json(file if find_file_or_xz(file).exists() else ROOT / BENCHED / name)


@cache
def sweep(name: str) -> SweepResult:
    """The sweep in a folder of research/results."""
    return read_sweep(folder(name) / "sweep.json")


def measured(name: str, model: str, scheme: str, task: str | None = None) -> TaskResult:
    """One cell of a sweep, whose scheme is as a table has it ("16", "4:row"); `model` begins the model's name."""
    found = [
        cell.result
        for cell in sweep(name).cells
        if cell.point.model.name.startswith(model) and cell.point.scheme_text == scheme and task in (None, cell.task)
    ]
    if len(found) != 1 or found[0] is None:
        raise LookupError(f"{name}: {len(found)} cells are {model} {scheme} {task}")
    return found[0]


def files_of(place: str) -> list[Path]:
    """Raw files below a folder, or the file itself, by its path from the root, compressed or not; no pictures.

    Raises:
        UsageError: there is none.
    """
    path = ROOT / place
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [find_file_or_xz(path)]
    found = sorted(file for file in files if file.exists() and file.suffix != ".png")
    if not found:
        raise UsageError(f"there is no raw file {place}")
    return found


def digest(place: str) -> str:
    """The first eight digits of a SHA-256 of the names and contents of raw files."""
    total = hashlib.sha256()
    for file in files_of(place):
        name = str(file.relative_to(ROOT)).removesuffix(".xz")
        total.update(f"{name}\n{hashlib.sha256(read_text_or_xz(file).encode()).hexdigest()}\n".encode())
    return total.hexdigest()[:8]


def raw_files(made_by: Mapping[str, str]) -> str:
    """Table of the raw files that a page is rendered from.

    Args:
        made_by: the command that made a file or a folder of files, by its path from the root.
    """
    rows = [f"| `{place}` | {digest(place)} | {command} |" for place, command in made_by.items()]
    return "\n".join(["| raw files | digest | made by |", "|---|---|---|", *rows])
