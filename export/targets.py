"""Export formats that can be run, each recognized by the files in its folders."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.onnx.files import model_file

if TYPE_CHECKING:
    from diffquant.measure.sweep.exported import Runtime


@dataclass(frozen=True)
class ExportFormat:
    """An export format whose folders a runtime opens directly.

    GGUF is not one: a GGUF file is opened as a checkpoint. `runtime` imports its libraries when it is called, since
    recognizing a folder must not need any.

    Attributes:
        name: name of the format in commands.
        recognizes: function that returns whether a folder is in this format, judging by file names only.
        runtime: function that returns the runtime with which evaluations open such folders. It raises
            MissingDependencyError if a library is not installed.
    """

    name: str
    recognizes: Callable[[Path], bool]
    runtime: Callable[[], "Runtime"]


def _load_onnx_runtime() -> "Runtime":
    from diffquant.onnx import check_installed

    check_installed()
    from diffquant.onnx.runtime.scoring import OnnxRuntime

    return OnnxRuntime()


ONNX = ExportFormat("onnx", lambda folder: model_file(folder).is_file(), _load_onnx_runtime)
TARGETS = {ONNX.name: ONNX}


def register_format(target: ExportFormat) -> ExportFormat:
    """Add an export format to `TARGETS`, and return it."""
    TARGETS[target.name] = target
    return target


def export_format_of(folder: Path) -> ExportFormat | None:
    """Return the export format of a folder, or None if it is a checkpoint."""
    return next((target for target in TARGETS.values() if target.recognizes(folder)), None)


def runtime_of(folder: Path) -> "Runtime | None":
    """Return the runtime that opens an exported folder, or None if it is a checkpoint.

    Raises:
        MissingDependencyError: the runtime's library is not installed.
    """
    target = export_format_of(folder)
    return None if target is None else target.runtime()
