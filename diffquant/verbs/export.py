"""The verb `export`: a checkpoint as an ONNX model, the ranges of a quantized cache found where none are given."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.export import require
from diffquant.export.targets.onnx import ONNX
from diffquant.recipe import Recipe
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs.arguments import path_or_none

if TYPE_CHECKING:
    from diffquant.export.exporter import OnnxReport


def export(
    source: Path | str | Source,
    destination: Path | str,
    *,
    weights: str | int = 16,
    kv: int = 16,
    logits: str | int = 16,
    embed: int = 16,
    scales: Path | str | None = None,
    dtype: str = "float32",
    cache: bool = True,
    opset: int = 23,
    pure_onnx: bool = False,
    accuracy_level: int = 4,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "OnnxReport":
    """Write a checkpoint, plain or quantized, as an ONNX model for ONNX Runtime.

        print(diffquant.export("checkpoint-4bit", "checkpoint-onnx", kv=8).summary())

    Args:
        source: a folder of safetensors, plain or quantized, or a .gguf file.
        destination: the folder to make; it appears whole or not at all.
        weights: scheme of a plain checkpoint's weights, such as "4:g32".
        kv: bits of the KV cache: 16, 8, or 4 (experimental).
        logits: scheme of the attention logits.
        embed: bits of embedding and head: 16 or 8.
        scales: file of ranges that `calibrate` wrote, for a quantized cache; found by a short run otherwise.
        dtype: dtype of the activations, "float32" or "float16".
        cache: whether the model has a KV cache.
        opset: opset of ONNX's standard domain.
        pure_onnx: whether standard ONNX ops alone are used.
        accuracy_level: 4 to round activations to int8 in products with codes, or 1 to keep float32, which is slow.
        overwrite: replace an existing folder there, at the end.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Raises:
        DiffQuantError: anything wrong with the source, the options or the destination; nothing is left then.
        MissingDependencyError: onnx or onnxruntime is not installed.
    """
    require()
    from diffquant.export.options import ExportOptions

    options = ExportOptions.parse(
        str(weights),
        str(logits),
        kv_bits=kv,
        dtype=dtype,
        embed_bits=embed,
        cache=cache,
        opset=opset,
        pure=pure_onnx,
        accuracy_level=accuracy_level,
    )
    shown = progress or progress_for("export")
    checked = ONNX.check(source if isinstance(source, Source) else Path(source), Path(destination), options, overwrite)
    ranges: Ranges | Path | None = path_or_none(scales)
    if kv < 16 and ranges is None:
        ranges = calibrate_cache(checked, Recipe(weights=options.weights, logits=options.logits), progress=shown)
    return ONNX.write(checked, Path(destination), options, ranges, overwrite, shown)
