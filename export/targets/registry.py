"""The protocol of an export target, and the registry of targets."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from diffquant.source.ranges import Ranges
from diffquant.source.source import Source
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.sweep.exported import Runtime

Options_contra = TypeVar("Options_contra", contravariant=True)


class ExportReport(Protocol):
    """What a run of an export did."""

    def summary(self) -> str:
        """A few lines for people."""
        ...


class ExportTarget(Protocol[Options_contra]):
    """A format that checkpoints are exported to, and that is run as it is.

    A target imports what it needs inside its methods: asking whose a folder is must need none of its libraries.
    """

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def opens(self, folder: Path) -> bool:
        """Whether a folder is one that `write` made, by the names of its files alone."""
        ...

    def check(self, source: Path | Source, destination: Path, options: Options_contra, overwrite: bool) -> Source:
        """The opened checkpoint of an export that can be made; nothing is calculated or written yet.

        Raises:
            DiffQuantError: anything wrong with the source, the options or the destination.
        """
        ...

    def write(
        self,
        source: Source,
        destination: Path,
        options: Options_contra,
        ranges: Ranges | Path | None,
        overwrite: bool,
        progress: Progress,
    ) -> ExportReport:
        """Write a folder, whole or not at all.

        Args:
            ranges: calibrated ranges of a quantized KV cache, or their file.

        Raises:
            DiffQuantError: as `check`, and anything wrong with the ranges.
        """
        ...

    def runtime(self) -> "Runtime":
        """What evaluations run such folders with.

        Raises:
            MissingDependencyError: a library that it needs is not installed.
        """
        ...


# Options differ from target to target; whoever gives options names the target itself.
TARGETS: dict[str, ExportTarget[Any]] = {}

Target = TypeVar("Target", bound=ExportTarget[Any])


def register(target: Target) -> Target:
    """Make a target known by its name."""
    TARGETS[target.name] = target
    return target


def target_of(folder: Path) -> ExportTarget[Any] | None:
    """The target that a folder was exported to; None for a checkpoint."""
    return next((target for target in TARGETS.values() if target.opens(folder)), None)


def runtime_of(folder: Path) -> "Runtime | None":
    """What opens an exported folder, for sweeps and evaluations; None for a checkpoint.

    Raises:
        MissingDependencyError: a library that it needs is not installed.
    """
    target = target_of(folder)
    return None if target is None else target.runtime()
