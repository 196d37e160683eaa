"""The verb `export`: a checkpoint as an ONNX model, the ranges of a quantized cache found where none are given."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme as ParsedScheme
from diffquant.support.progress import Progress, progress_for
from diffquant.support.spelling import spelled
from diffquant.verbs import kinds
from diffquant.verbs.arguments import path_or_none
from diffquant.verbs.checked import checked
from diffquant.verbs.hub import at_revision, check_push, push_folder
from diffquant.verbs.notes import note_if_transformer, say

if TYPE_CHECKING:
    from diffquant.export.exporter import OnnxReport
    from diffquant.source.ranges import Ranges
    from diffquant.source.source import Source

Bits = Annotated[int, kinds.Kind(int, "BITS")]


@checked
def export(
    model: kinds.Model,
    output: kinds.NewFolder,
    *,
    weights: kinds.Scheme = 16,
    kv: kinds.Scheme | None = None,
    scales: kinds.File | None = None,
    logits: kinds.Scheme = 16,
    dtype: kinds.Name = "float32",
    embed: Bits = 16,
    cache: bool = True,
    opset: int | None = None,
    portable: bool = False,
    accuracy_level: int = 4,
    genai_device: kinds.Name = "cpu",
    web: bool = False,
    revision: kinds.Name | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "OnnxReport":
    """Write a checkpoint as a model for ONNX Runtime.

        diffquant export model -o model-onnx --weights 4:g32 --kv 8
        print(diffquant.export("model-4bit", "model-onnx", kv=8).summary())

    Args:
        model, output, logits, revision, push, overwrite: as `quantize` takes them.
        weights: scheme of a plain checkpoint's weights: 4:g32, 6:row, 8 or 16.
        kv: scheme of the KV cache: 16, 8:static, or 4:static (experimental); by default the checkpoint's bits, with
            static scales.
        scales: ranges of the KV cache that diffquant calibrate wrote; a short run finds them otherwise.
        dtype: dtype of the activations: float32 or float16.
        embed: bits of embedding and head: 16 or 8.
        cache: False makes a model without a KV cache.
        opset: opset of the standard ONNX operators: 23 by default, and with portable the oldest that has them.
        portable: write the folder for readers beside ONNX Runtime: OpenVINO, transformers.js, optimum.
        accuracy_level: precision of products with 4-bit codes: 4 rounds activations to int8, 1 keeps float32, which is
            slow.
        genai_device: device that onnxruntime-genai will use: cpu, cuda or cuda:N.
        web: add the outputs that examples/web draws attention maps from.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        Sizes, and the oldest ONNX Runtime that opens the model.

    Raises:
        DiffQuantError: anything wrong with the checkpoint, the options or the output; nothing is left then.
        MissingDependencyError: onnx or onnxruntime is not installed.
    """
    started, calibrated = time.monotonic(), 0.0
    from diffquant.export import require

    require()
    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.export.exporter import check_export, write_export
    from diffquant.export.options import ExportOptions
    from diffquant.source.source import open_source

    check_push(push)
    source = open_source(at_revision(model, revision))
    options = ExportOptions.parse(
        str(weights),
        str(logits),
        kv_bits=(_own_bits(source) if cache and not web else 16) if kv is None else _cache_bits(kv),
        dtype=dtype,
        embed_bits=embed,
        cache=cache,
        opset=opset or 0,
        portable=portable,
        accuracy_level=accuracy_level,
        genai_device=genai_device,
        web=web,
    )
    folder, shown = Path(output), progress or progress_for("export")
    plan = check_export(source, folder, options, overwrite)
    note_if_transformer(plan.source)
    ranges: Ranges | Path | None = path_or_none(scales)
    if options.kv_bits < 16 and ranges is None:
        begun = time.monotonic()
        ranges = calibrate_cache(plan.source, Recipe(weights=options.weights, logits=options.logits), progress=shown)
        calibrated = time.monotonic() - begun
    report = write_export(plan, folder, ranges, overwrite, shown)
    report = replace(report, seconds=time.monotonic() - started, calibrated=calibrated)
    push_folder(folder, push)
    return report


def _own_bits(source: "Source") -> int:
    """Bits of an exported model's cache that the checkpoint's recipe asks for; how they differ from it is said."""
    k, v = source.recipe.k, source.recipe.v
    if not (k.quantizes or v.quantizes):
        return 16
    schemes = f"k {k}, v {v}"
    differ = source.recipe.schemes_of("k") | source.recipe.schemes_of("v") > {k, v}
    if differ or k.format.name != v.format.name or k.format.name not in ("8", "4"):
        say(f"note: no kernel of ONNX Runtime reads the checkpoint's cache ({schemes}): exported with 16 bits")
        return 16
    say(f"note: the cache becomes {k.bits}:static of the checkpoint's {schemes}, with calibrated scales per channel")
    return k.bits


def _cache_bits(scheme: str | int) -> int:
    """The bits of an exported model's KV cache, whose scales are calibrated.

    Raises:
        UsageError: the scheme has another granularity.
    """
    bits, _, granularity = str(scheme).partition(":")
    if granularity not in ("", "static"):
        raise UsageError(
            f"{spelled('kv', scheme)}: an exported cache has calibrated scales, one per channel; give {bits}"
        )
    return ParsedScheme.parse(scheme, default="static").bits
