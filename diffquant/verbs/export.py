"""The verb `export`: writes a checkpoint as an ONNX model, with ranges for a quantized cache, or as a GGUF file."""

import inspect
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme as ParsedScheme
from diffquant.support.names import did_you_mean, option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, to_path
from diffquant.verbs.notes import check_push, note_if_transformer, push_folder, say

if TYPE_CHECKING:
    from diffquant.checkpoints.ranges import Ranges
    from diffquant.checkpoints.source import Source
    from diffquant.onnx.exporter import OnnxReport
    from diffquant.onnx.gguf.writer import GgufReport

Bits = Annotated[int, kinds.Kind(int, "BITS")]
Format = Annotated[str, kinds.Kind(Literal["onnx", "gguf"])]
# Options of ONNX exports, which a GGUF file cannot store.
_ONLY_ONNX = ("kv", "scales", "logits", "cache", "portable", "accuracy_level", "genai_device", "web")


@check_arguments
def export(
    model: kinds.Model,
    output: kinds.NewFolder,
    *,
    to: Format = "onnx",
    weights: kinds.Scheme = 16,
    kv: kinds.Scheme | None = None,
    scales: kinds.File | None = None,
    logits: kinds.Scheme = 16,
    dtype: kinds.Name | None = None,
    embed: Bits = 16,
    cache: bool = True,
    portable: bool = False,
    accuracy_level: int = 4,
    genai_device: kinds.Name = "cpu",
    web: bool = False,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "OnnxReport | GgufReport":
    """Write a checkpoint for ONNX Runtime, or as a GGUF file.

        diffquant export model -o model-onnx --weights 4:g32 --kv 8
        print(diffquant.export("model-4bit", "model-onnx", kv=8).summary())
        diffquant.export("llama-4bit", "llama-4bit.gguf", to="gguf")

    Args:
        model, push, overwrite: see `quantize`.
        output: folder to create; for GGUF also a file that ends in .gguf.
        to: format: onnx or gguf; gguf accepts only the options weights, dtype and embed.
        logits: scheme of attention logits, whose rounding is simulated: 6:row, 4:tensor, 4:row:shift or 16.
        weights: scheme of a plain checkpoint's weights: 4:g32, 6:row, 8 or 16.
        kv: scheme of the KV cache: 16, 8:static, or 4:static (experimental); by default the bits of the checkpoint's
            recipe, with static scales.
        scales: ranges of the KV cache that diffquant calibrate wrote; by default a short calibration finds them.
        dtype: dtype of the activations: float32, the default, or float16; for GGUF the dtype of unquantized matrices,
            by default the source's.
        embed: bits of embedding and head: 16 or 8.
        cache: False exports a model without a KV cache.
        portable: write a folder that OpenVINO, transformers.js and optimum can also read.
        accuracy_level: precision of matmuls with 4-bit weights: 4 rounds activations to int8, 1 keeps float32, which is
            slow.
        genai_device: device that onnxruntime-genai will use: cpu, cuda or cuda:N.
        web: add the outputs from which examples/web draws attention maps.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        Sizes, and the oldest ONNX Runtime that can open the model; for GGUF, a summary of the file's contents.

    Raises:
        DiffQuantError: the checkpoint, an option or the output cannot be used; no output is left.
        MissingDependencyError: onnx or onnxruntime is not installed.
    """
    started, calibrated, given = time.monotonic(), 0.0, locals()
    if to != "onnx":
        return _export_gguf(to, given)
    from diffquant.onnx import check_installed

    check_installed()
    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.checkpoints.source import open_source
    from diffquant.onnx.exporter import check_and_plan_export, write_export
    from diffquant.onnx.options import ExportOptions

    check_push(push)
    source = open_source(model)
    options = ExportOptions.parse(
        str(weights),
        str(logits),
        kv_bits=(_recorded_bits(source) if cache and not web else 16) if kv is None else _cache_bits(kv),
        dtype=dtype or "float32",
        embed_bits=embed,
        cache=cache,
        portable=portable,
        accuracy_level=accuracy_level,
        genai_device=genai_device,
        web=web,
    )
    folder, shown = Path(output), progress or progress_for("export")
    plan = check_and_plan_export(source, folder, options, overwrite)
    note_if_transformer(plan.source)
    ranges: Ranges | Path | None = to_path(scales)
    if options.kv_bits < 16 and ranges is None:
        begun = time.monotonic()
        ranges = calibrate_cache(plan.source, Recipe(weights=options.weights, logits=options.logits), progress=shown)
        calibrated = time.monotonic() - begun
    report = write_export(plan, folder, ranges, overwrite, shown)
    report = replace(report, seconds=time.monotonic() - started, calibrated=calibrated)
    push_folder(folder, push)
    return report


def _export_gguf(to: str, given: Mapping[str, Any]) -> "GgufReport":
    """Write a GGUF file.

    Args:
        given: the verb's arguments.

    Raises:
        UsageError: the format is unknown, or a GGUF file cannot store some option.
    """
    if to != "gguf":
        raise UsageError(f"unknown format {to!r}{did_you_mean(to, ['onnx', 'gguf'])}")
    parameters = inspect.signature(export).parameters
    others = [option_name(name) for name in _ONLY_ONNX if str(given[name]) != str(parameters[name].default)]
    if others:
        raise UsageError(
            f"{', '.join(others)}: a GGUF file cannot store this; leave it out with {option_name('to', to)}"
        )
    if given["embed"] not in (8, 16):
        raise UsageError(f"{option_name('embed', given['embed'])}: a GGUF file's embedding and head take 8 or 16 bits")
    from diffquant.onnx.gguf.writer import export_gguf
    from diffquant.support.devices import as_dtype

    push, output = given["push"], Path(given["output"])
    check_push(push, output)
    report = export_gguf(
        given["model"],
        output,
        ParsedScheme.parse(str(given["weights"]), "g32", "weights"),
        embedding_and_head=ParsedScheme.parse("8:g32" if given["embed"] == 8 else "16"),
        dtype=as_dtype(given["dtype"]),
        overwrite=given["overwrite"],
        progress=given["progress"] or progress_for("export"),
    )
    push_folder(output, push)
    return report


def _recorded_bits(source: "Source") -> int:
    """Return the bits at which the checkpoint's cache is exported, 16 if no kernel supports them; print a note."""
    k, v = source.recipe.k, source.recipe.v
    if not (k.quantizes or v.quantizes):
        return 16
    schemes = f"k {k}, v {v}"
    differs_by_layer = source.recipe.schemes_of("k") | source.recipe.schemes_of("v") > {k, v}
    if differs_by_layer or k.format.name != v.format.name or k.format.name not in ("8", "4"):
        say(f"note: no kernel of ONNX Runtime supports the checkpoint's cache ({schemes}): it is exported at 16 bits")
        return 16
    ours = f"{k.bits}:static"
    if {str(k), str(v)} != {ours}:
        say(f"note: the cache is exported at {ours}, calibrated per channel, not at the checkpoint's {schemes}")
    return k.bits


def _cache_bits(scheme: str | int) -> int:
    """Return the bits of an exported model's KV cache, whose scales are calibrated.

    Raises:
        UsageError: the scheme has another granularity.
    """
    bits, _, granularity = str(scheme).partition(":")
    if granularity not in ("", "static"):
        raise UsageError(
            f"{option_name('kv', scheme)}: an exported cache has calibrated scales, one per channel; give {bits}"
        )
    return ParsedScheme.parse(scheme, default="static").bits
