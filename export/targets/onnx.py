"""The target "onnx": a model.onnx with the differential-attention op, for ONNX Runtime."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.export import require
from diffquant.export.files import MODEL_FILE
from diffquant.export.targets.registry import register
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.export.exporter import OnnxReport
    from diffquant.export.options import ExportOptions
    from diffquant.sweep.exported import Runtime


class OnnxTarget:
    """ONNX models."""

    name = "onnx"

    def opens(self, folder: Path) -> bool:
        return (folder / MODEL_FILE).is_file()

    def check(self, source: Path | Source, destination: Path, options: "ExportOptions", overwrite: bool) -> Source:
        require()
        from diffquant.export.exporter import check_export

        return check_export(source, destination, options, overwrite).source

    def write(
        self,
        source: Source,
        destination: Path,
        options: "ExportOptions",
        ranges: Ranges | Path | None,
        overwrite: bool,
        progress: Progress,
    ) -> "OnnxReport":
        require()
        from diffquant.export.exporter import export

        return export(source, destination, options, ranges=ranges, overwrite=overwrite, progress=progress)

    def runtime(self) -> "Runtime":
        require()
        from diffquant.export.runtime.scoring import OnnxRuntime

        return OnnxRuntime()


ONNX = register(OnnxTarget())
