"""Export targets whose folders can be run, each with a function that recognizes them by their files.

GGUF is not one: a GGUF file is opened as a checkpoint.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.onnx.files import model_file

if TYPE_CHECKING:
    from diffquant.measure.sweep.exported import Runtime


def onnx_runtime(folder: Path) -> "Runtime | None":
    """Return the runtime of a folder with an ONNX graph, or None if the folder has no such graph.

    Raises:
        MissingDependencyError: onnx or onnxruntime is not installed.
    """
    if not model_file(folder).is_file():
        return None
    # Recognizing a folder must not need any library.
    from diffquant.onnx import check_installed

    check_installed()
    from diffquant.onnx.runtime.scoring import OnnxRuntime

    return OnnxRuntime()


TARGETS: list[Callable[[Path], "Runtime | None"]] = [onnx_runtime]


def runtime_of(folder: Path) -> "Runtime | None":
    """Return the runtime that opens an exported folder, or None if it is a checkpoint.

    Raises:
        MissingDependencyError: the runtime's library is not installed.
    """
    return next((runtime for target in TARGETS if (runtime := target(folder))), None)
