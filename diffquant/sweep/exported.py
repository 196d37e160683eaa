"""Exported folders as rows of a sweep. Callers pass the runtime, since the core does not import `export`."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol, Self

from diffquant.errors import CheckpointError, UsageError
from diffquant.evals.language_model import LanguageModel, States
from diffquant.evals.task import Task
from diffquant.recipe import Recipe
from diffquant.source.identity import FilesState, files_state
from diffquant.source.source import Source
from diffquant.support.code import commit
from diffquant.support.digests import FileDigests
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled
from diffquant.sweep.grid import EXPORTED, Point, SweepOptions
from diffquant.sweep.measurement import Measurement
from diffquant.sweep.subject import CheckpointSubject, Setup


@dataclass(frozen=True)
class ExportedModel:
    """An exported folder as a subject of a sweep.

    Attributes:
        bits: width of its weights; 16 where they are not quantized.
        scheme: precision of all its parts as the table shows it, such as "4:g32 kv 8".
        identity: plain data that determines its results.
        sources: digests of the weight files it was made from, and of those its quantized source was made from.
        weight_bytes: size of its weights on disk.
        kv_bytes: size of a token in its cache, over all layers.
    """

    bits: int
    scheme: str
    identity: JsonObject
    sources: tuple[FileDigests, ...]
    weight_bytes: int
    kv_bytes: float


class Runtime(Protocol):
    """Opens exported folders. It is pickled along with subjects, so it holds nothing open itself.

    Attributes:
        batch_tokens: largest number of tokens per pass that it runs efficiently.
    """

    batch_tokens: int

    def describe(self, folder: Path, device: str) -> ExportedModel:
        """Describe a folder for a sweep on a device; "auto" lets the runtime choose one.

        Raises:
            CheckpointError: the folder is damaged, or changed since it was exported.
        """

    def open(self, folder: Path, device: str) -> LanguageModel:
        """The folder's model, on a device."""


# Maps a path to the runtime that opens it, or to None for a checkpoint.
RuntimeOf = Callable[[Path], Runtime | None]


@dataclass(eq=False)
class ExportedSubject:
    """An exported folder, measured as it is.

    Attributes:
        setup: settings of the sweep's checkpoints.
        device: device that the folder runs on; "auto" lets the runtime choose one.
        state: state of the folder's files before it was described.
        compared_with: checkpoint whose 16-bit results it is compared with, if any.
    """

    folder: Path
    runtime: Runtime
    setup: Setup
    device: str
    state: FilesState
    model: ExportedModel
    compared_with: CheckpointSubject | None = None

    @classmethod
    def of(cls, folder: Path, runtime: Runtime, setup: Setup, device: str) -> Self:
        """Make the subject of a folder, reading its description now.

        Raises:
            CheckpointError: the folder is damaged, or changed since it was exported.
        """
        return cls(folder, runtime, setup, device, _folder_state(folder), runtime.describe(folder, device))

    @property
    def held_bytes(self) -> int:
        return self.model.weight_bytes + (self.compared_with.held_bytes if self.compared_with else 0)

    def key(self, recipe: Recipe) -> JsonObject:  # noqa: ARG002
        baseline = self.compared_with
        compared = {"compared_with": baseline.source.fingerprint if baseline else None}
        setup = self.setup.common_key() | (self.setup.key() if baseline else {})
        return {"model": self.model.identity} | compared | setup

    def modules(self, recipe: Recipe) -> tuple[str, ...]:
        compared = self.compared_with.modules(recipe) if self.compared_with else ()
        return (__name__, type(self.runtime).__module__, *compared)

    def apart(self, device: str | None) -> "ExportedSubject":
        compared = self.compared_with.apart(device) if self.compared_with else None
        setup = replace(self.setup, device=device or self.setup.device)
        return replace(self, compared_with=compared, setup=setup, device=device or self.device)

    def reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> States | None:  # noqa: ARG002
        return self.compared_with.reference(task, None, progress) if self.compared_with else None

    def measure(self, task: Task, recipe: Recipe | None, reference: States | None, progress: Progress) -> Measurement:  # noqa: ARG002
        model = self._opened
        started = time.monotonic()
        # Each sequence runs by itself, so the task's batch size only bounds memory.
        bounded = task.in_batches_of(self.runtime.batch_tokens)
        result = bounded.run(model, reference, progress)
        seconds = round(time.monotonic() - started, 2)
        # Files may be touched without changing: compare what they hold before saying that the model changed.
        touched = _folder_state(self.folder) != self.state
        if touched and self.runtime.describe(self.folder, self.device) != self.model:
            raise CheckpointError(f"{self.folder} changed while it was in use; run the same command again")
        return Measurement(result, seconds, self.model.weight_bytes, self.model.kv_bytes, commit=commit())

    @cached_property
    def _opened(self) -> LanguageModel:
        return self.runtime.open(self.folder, self.device)


def _folder_state(folder: Path) -> FilesState:
    """The state of an exported folder's files."""
    return files_state(file for file in sorted(folder.rglob("*")) if file.is_file())


def check_on_one_device(folders: Collection[Path], options: SweepOptions) -> None:
    """Check that no exported folder would be spread over devices.

    Raises:
        UsageError: one would be.
    """
    if folders and options.device_map is not None:
        raise UsageError(
            f"ONNX Runtime keeps an exported folder on one device: leave out {spelled('device_map')}, or "
            f"{', '.join(map(str, folders))}"
        )


def check_as_it_is(options: SweepOptions, recipe: Recipe | None = None) -> None:
    """Check that no option asks an exported model for another precision than its own.

    Raises:
        UsageError: an option does.
    """
    asked = (options.dtype, options.attention, options.scales)
    if recipe is not None or asked != ("auto", "auto", ()):
        raise UsageError(
            f"an exported model is measured as it is: leave out the recipe, {spelled('scales')}, {spelled('dtype')} "
            f"and {spelled('attention')}"
        )


def exported_points(exported: Mapping[Path, ExportedModel], sources: Mapping[Path, Source]) -> list[Point]:
    """One point per folder, compared with the checkpoint it was made from, quantized or not, if the sweep has it."""
    if not exported:
        return []

    @cache
    def weights_of(path: Path, algorithm: str) -> frozenset[str]:
        return FileDigests.of(sources[path].checkpoint.weight_files(), algorithm).contents

    def checkpoint_of(model: ExportedModel) -> Path | None:
        origins = ((path, files) for path in sources for files in model.sources)
        return next(
            (path for path, made_of in origins if weights_of(path, made_of.algorithm) == made_of.contents), None
        )

    return [
        Point(folder, EXPORTED, model.bits, model.scheme, Recipe(), checkpoint_of(model))
        for folder, model in exported.items()
    ]
