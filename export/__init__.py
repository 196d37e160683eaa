"""ONNX export: the differential-attention op, the exporter, and running and verifying exported models.

`diffquant.export(source, destination)` calls `diffquant.verbs.export`, which also calibrates a quantized cache.
Submodules are imported when a name is first used; `check_installed` checks that the `onnx` extra is installed.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from diffquant.errors import MissingDependencyError

if TYPE_CHECKING:
    from diffquant.onnx.exporter import export
    from diffquant.onnx.native import library_path
    from diffquant.onnx.options import ExportOptions
    from diffquant.onnx.runtime.generation import Generator
    from diffquant.onnx.verifier import verify

_HOMES = {
    "export": "diffquant.onnx.exporter",
    "ExportOptions": "diffquant.onnx.options",
    "Generator": "diffquant.onnx.runtime.generation",
    "library_path": "diffquant.onnx.native",
    "verify": "diffquant.onnx.verifier",
}

# Increase it if a change alters stored results, so that they are measured again.
RESULT_VERSION = 1

__all__ = ["ExportOptions", "Generator", "check_installed", "export", "library_path", "verify"]


def check_installed() -> None:
    """Check that the packages of the `onnx` extra are installed.

    Raises:
        MissingDependencyError: some packages are not installed; the message names them all.
    """
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        from diffquant.support.installation import install_command

        raise MissingDependencyError(f"ONNX models need {', '.join(missing)}: {install_command('onnx')}")


if not TYPE_CHECKING:  # A type checker that saw this function would accept any name as one of the package's.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'diffquant.onnx' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
