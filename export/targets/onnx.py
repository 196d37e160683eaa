"""The target "onnx": a model.onnx with the differential-attention op, for ONNX Runtime."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.export import require
from diffquant.export.files import model_file
from diffquant.export.targets.registry import register

if TYPE_CHECKING:
    from diffquant.sweep.exported import Runtime


class OnnxTarget:
    """ONNX models, which the verb `export` writes."""

    name = "onnx"

    def opens(self, folder: Path) -> bool:
        return model_file(folder).is_file()

    def runtime(self) -> "Runtime":
        require()
        from diffquant.export.runtime.scoring import OnnxRuntime

        return OnnxRuntime()


ONNX = register(OnnxTarget())
