"""Exported folders as rows of a sweep. What runs them is handed in, since the core imports no room."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from diffquant.errors import UsageError
from diffquant.evals.language_model import States
from diffquant.scheme import Recipe
from diffquant.source.source import Source
from diffquant.support.files import file_digest
from diffquant.support.progress import Progress
from diffquant.sweep.grid import EXPORTED, Point, SweepOptions
from diffquant.sweep.session import Session
from diffquant.sweep.tasks import Task


@dataclass(frozen=True)
class ExportedModel:
    """What a sweep must know of an exported folder.

    Attributes:
        bits: of its weights; 16 where they are not quantized.
        scheme: its whole precision as the table shows it, such as "4:g32 kv 8".
        identity: plain data that determines its results.
        sources: digests of the weight files it was made from, and of those its quantized source was made from.
        weight_bytes: on disk.
        kv_bytes: of a token in the cache, over all layers.
    """

    bits: int
    scheme: str
    identity: dict[str, Any]
    sources: tuple[frozenset[str], ...]
    weight_bytes: int
    kv_bytes: float


class Runtime(Protocol):
    """What opens and runs exported folders."""

    def describe(self, folder: Path) -> ExportedModel: ...

    def run(self, folder: Path, task: Task, reference: States | None, progress: Progress) -> dict[str, Any]: ...


@dataclass
class ExportedSession:
    """One exported folder under measurement, in the place of a `Session`."""

    folder: Path
    model: ExportedModel
    runtime: Runtime
    compared_with: Session | None

    def measure(self, task: Task, recipe: Recipe, progress: Progress) -> dict[str, Any]:
        """As `Session.measure`; the folder is measured as it is."""
        reference = self.compared_with.reference(task, progress) if self.compared_with else None
        started = time.monotonic()
        result = self.runtime.run(self.folder, task, reference, progress)
        result["seconds"] = round(time.monotonic() - started, 2)
        result["stored"] = {"weights": self.model.weight_bytes, "kv_per_token": self.model.kv_bytes}
        return result


def is_exported(path: Path) -> bool:
    """Whether a path is a folder with an ONNX model."""
    return (path / "model.onnx").is_file()


def check_as_it_is(options: SweepOptions, recipe: Recipe | None = None) -> None:
    """Check that nothing asks for another precision or place than an exported model has.

    Raises:
        UsageError: something does.
    """
    asked = (options.dtype, options.attention, options.device, options.scales)
    if recipe is not None or asked != ("auto", "auto", "cpu", ()):
        raise UsageError(
            "an exported model is measured as it is: leave out the recipe options, --scales, --dtype, --attention and "
            "--device"
        )


def describe(paths: Sequence[Path], runtime: Runtime | None) -> dict[Path, ExportedModel]:
    """The exported folders among these paths.

    Raises:
        UsageError: there are some, and nothing to run them.
        CheckpointError: a folder is damaged.
    """
    folders = [path for path in paths if is_exported(path)]
    if folders and runtime is None:
        raise UsageError(f"{folders[0]} is an exported model, and run_sweep was given no runtime for it")
    return {folder: runtime.describe(folder) for folder in folders} if runtime else {}


def exported_points(exported: Mapping[Path, ExportedModel], sources: Mapping[Path, Source]) -> list[Point]:
    """One point a folder, compared with the checkpoint among these that it was made from, quantized or not."""
    if not exported:
        return []
    held = {path: frozenset(map(file_digest, source.checkpoint.weight_files())) for path, source in sources.items()}

    def source_of(model: ExportedModel) -> Path | None:
        return next((path for path, digests in held.items() if digests in model.sources), None)

    return [
        Point(folder, EXPORTED, model.bits, model.scheme, Recipe(), source_of(model))
        for folder, model in exported.items()
    ]
