"""ONNX: the differential-attention op, the exporter, and running and proving what it wrote.

`diffquant.export(source, destination)` is the verb of `diffquant.verbs.export`, which finds a cache's ranges too.
Nothing is imported until a name is used; `require` says what of the `onnx` extra is missing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from diffquant.errors import MissingDependencyError

if TYPE_CHECKING:
    from diffquant.export.exporter import export
    from diffquant.export.native import library_path
    from diffquant.export.options import ExportOptions
    from diffquant.export.runtime.generation import Generator
    from diffquant.export.verification.verify import verify

_HOMES = {
    "export": "diffquant.export.exporter",
    "ExportOptions": "diffquant.export.options",
    "Generator": "diffquant.export.runtime.generation",
    "library_path": "diffquant.export.native",
    "verify": "diffquant.export.verification.verify",
}

__all__ = ["ExportOptions", "Generator", "export", "library_path", "require", "verify"]


def require() -> None:
    """Check that the packages of the `onnx` extra are installed.

    Raises:
        MissingDependencyError: some are not; the message names them all.
    """
    missing = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        from diffquant.support.installation import install_command

        raise MissingDependencyError(f"ONNX models need {', '.join(missing)}: {install_command('onnx')}")


if not TYPE_CHECKING:  # A type checker that saw this function would take any name for one of the package's.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'diffquant.export' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
