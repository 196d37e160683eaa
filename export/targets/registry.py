"""The protocol of an export target, and the registry of targets."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from diffquant.sweep.exported import Runtime


class ExportTarget(Protocol):
    """A format that checkpoints are exported to, and that is run as it is. What writes it is a verb of its own.

    A target imports what it needs inside its methods: asking whose a folder is must need none of its libraries.
    """

    @property
    def name(self) -> str:
        """The target's name in commands."""
        ...

    def opens(self, folder: Path) -> bool:
        """Whether a folder holds such an export, by the names of its files alone."""
        ...

    def runtime(self) -> "Runtime":
        """The runtime that evaluations open such folders with.

        Raises:
            MissingDependencyError: a library that it needs is not installed.
        """
        ...


TARGETS: dict[str, ExportTarget] = {}

Target = TypeVar("Target", bound=ExportTarget)


def register(target: Target) -> Target:
    """Make a target known by its name."""
    TARGETS[target.name] = target
    return target


def target_of(folder: Path) -> ExportTarget | None:
    """The target that a folder was exported to; None for a checkpoint."""
    return next((target for target in TARGETS.values() if target.opens(folder)), None)


def runtime_of(folder: Path) -> "Runtime | None":
    """The runtime that opens an exported folder, for sweeps and evaluations; None for a checkpoint.

    Raises:
        MissingDependencyError: a library that it needs is not installed.
    """
    target = target_of(folder)
    return None if target is None else target.runtime()
