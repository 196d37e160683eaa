"""Exported folders as rows of a sweep. Callers pass the runtime, since the core does not import `export`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol, Self, TypeAlias

import torch

from diffquant.checkpoints.source import FilesState, Source, stat_files
from diffquant.errors import CheckpointError, UsageError
from diffquant.measure.cells import EXPORTED, SweepPoint
from diffquant.measure.language_model import LanguageModel, ModelOutputs
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.subject import CheckpointSubject, run_timed, settings_key
from diffquant.measure.task import Task
from diffquant.recipe import Recipe
from diffquant.support.digests import FileDigests
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress


@dataclass(frozen=True)
class ExportedDescription:
    """The description of an exported folder that a sweep measures.

    Attributes:
        bits: width of its weights in bits; 16 if they are not quantized.
        scheme: precision of all its parts as the table shows it, such as "4:g32 kv 8".
        identity: plain data that determines its results.
        sources: digests of the checkpoint's weight files, and of the files from which that checkpoint was quantized.
        weight_bytes: bytes of its weights on disk.
        kv_bytes: bytes per token of its KV cache, over all layers.
    """

    bits: int
    scheme: str
    identity: JsonObject
    sources: tuple[FileDigests, ...]
    weight_bytes: int
    kv_bytes: float


class Runtime(Protocol):
    """Opens exported folders. It is pickled along with subjects, so it keeps no file or session open.

    Attributes:
        batch_tokens: largest number of tokens per pass that it runs efficiently.
    """

    batch_tokens: int

    def describe(self, folder: Path, device: str) -> ExportedDescription:
        """Describe a folder for a sweep on a device; "auto" lets the runtime choose one.

        Raises:
            CheckpointError: the folder is damaged, or changed since it was exported.
        """

    def open(self, folder: Path, device: str) -> LanguageModel:
        """Open the folder's model on a device."""


# Maps a path to the runtime that opens it, or to None for a checkpoint.
RuntimeOf = Callable[[Path], Runtime | None]


@dataclass(eq=False)
class ExportedSubject:
    """An exported folder as a subject of a sweep, measured in its own precision.

    Attributes:
        device: device that the folder runs on; "auto" lets the runtime choose one.
        state: device, inode, size and times of the folder's files, read before it was described.
        dtype, computing_device: dtype and device of the sweep's checkpoints.
        compared_with: checkpoint whose 16-bit results are the baseline, or None if there is no baseline.
    """

    folder: Path
    runtime: Runtime
    device: str
    state: FilesState
    model: ExportedDescription
    dtype: torch.dtype
    computing_device: str
    compared_with: CheckpointSubject | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, runtime: Runtime, device: str, dtype: torch.dtype, computing_device: str
    ) -> Self:
        """Make the subject of a folder, reading its description now.

        Raises:
            CheckpointError: the folder is damaged, or changed since it was exported.
        """
        state = _folder_state(folder)
        return cls(folder, runtime, device, state, runtime.describe(folder, device), dtype, computing_device)

    @property
    def peak_weight_bytes(self) -> int:
        return self.model.weight_bytes + (self.compared_with.peak_weight_bytes if self.compared_with else 0)

    def key(self, recipe: Recipe) -> JsonObject:  # noqa: ARG002
        baseline = self.compared_with
        compared = {"compared_with": baseline.source.fingerprint if baseline else None}
        run = settings_key(self.dtype, self.computing_device) | (baseline.backend_key if baseline else {})
        return {"model": self.model.identity} | compared | run

    def python_modules(self, recipe: Recipe) -> tuple[str, ...]:
        compared = self.compared_with.python_modules(recipe) if self.compared_with else ()
        return (type(self.runtime).__module__, *compared)

    def copy_to(self, device: str | None) -> "ExportedSubject":
        compared = self.compared_with.copy_to(device) if self.compared_with else None
        device, computing_device = device or self.device, device or self.computing_device
        return replace(self, compared_with=compared, device=device, computing_device=computing_device)

    def compute_reference(self, task: Task, recipe: Recipe | None, progress: Progress) -> ModelOutputs | None:  # noqa: ARG002
        return self.compared_with.compute_reference(task, None, progress) if self.compared_with else None

    def measure(
        self,
        task: Task,
        recipe: Recipe | None,  # noqa: ARG002
        reference: ModelOutputs | None,
        progress: Progress,
    ) -> TaskResult:
        # Each sequence runs alone, so the task's batch size only bounds memory.
        bounded = task.with_batch_tokens(self.runtime.batch_tokens)
        result = run_timed(bounded, self._opened, reference, progress)
        # Times may change without the content: compare descriptions before reporting a change.
        touched = _folder_state(self.folder) != self.state
        if touched and self.runtime.describe(self.folder, self.device) != self.model:
            raise CheckpointError(f"{self.folder} changed while it was in use; run the same command again")
        return replace(result, weight_bytes=self.model.weight_bytes, kv_bytes=self.model.kv_bytes)

    @cached_property
    def _opened(self) -> LanguageModel:
        return self.runtime.open(self.folder, self.device)


# A model that a sweep measures. It holds one set of weights at a time, and none before the first cell.
Subject: TypeAlias = CheckpointSubject | ExportedSubject


def _folder_state(folder: Path) -> FilesState:
    """Return the state of an exported folder's files, which changes if one is written or replaced."""
    return stat_files(file for file in sorted(folder.rglob("*")) if file.is_file())


def check_on_one_device(folders: Collection[Path], options: SweepOptions) -> None:
    """Check that the options spread no exported folder over devices.

    Raises:
        UsageError: there are folders, and the options have a `device_map`.
    """
    if folders and options.device_map is not None:
        raise UsageError(
            f"ONNX Runtime keeps an exported folder on one device: leave out {option_name('device_map')}, or "
            f"{', '.join(map(str, folders))}"
        )


def check_no_precision_options(options: SweepOptions, recipe: Recipe | None = None) -> None:
    """Check that nothing would change the precision of an exported model, which is fixed.

    Raises:
        UsageError: a recipe is given, or the options set a dtype, an attention backend or scales.
    """
    if recipe is not None or (options.dtype, options.attention, options.scales) != ("auto", "auto", ()):
        raise UsageError(
            f"an exported model has a fixed precision: leave out the recipe, {option_name('scales')}, "
            f"{option_name('dtype')} and {option_name('attention')}"
        )


def make_exported_points(
    exported: Mapping[Path, ExportedDescription], sources: Mapping[Path, Source]
) -> list[SweepPoint]:
    """Make one configuration per exported folder, compared with its checkpoint if that is in the sweep.

    Args:
        exported: descriptions by folder.
        sources: the sweep's checkpoints by path.
    """

    @cache
    def weights_of(path: Path, algorithm: str) -> frozenset[str]:
        return FileDigests.compute(sources[path].checkpoint.weight_files(), algorithm).digest_set

    def checkpoint_of(model: ExportedDescription) -> Path | None:
        origins = ((path, files) for path in sources for files in model.sources)
        return next(
            (path for path, made_of in origins if weights_of(path, made_of.algorithm) == made_of.digest_set), None
        )

    return [
        SweepPoint(folder, EXPORTED, model.bits, model.scheme, Recipe(), checkpoint_of(model))
        for folder, model in exported.items()
    ]
