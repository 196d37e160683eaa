"""Export of a checkpoint, quantized or not, to a folder that ONNX Runtime opens."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from tokenizers import Tokenizer

from diffquant.checkpoints.atomic_folder import check_output, stage_output
from diffquant.checkpoints.ranges import Ranges, read_ranges, write_ranges
from diffquant.checkpoints.row_stream import checkpoint_key
from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import CheckpointError, UsageError
from diffquant.onnx.descriptions import packed_bytes, write_descriptions
from diffquant.onnx.files import RANGES_FILE
from diffquant.onnx.graph.matrix import container_bits
from diffquant.onnx.graph.plan import CACHE_LIMIT, ExportPlan, Scales, plan_export, static_scales
from diffquant.onnx.graph.streaming import StreamedTensor, assign_offsets, write_data_file
from diffquant.onnx.options import ExportOptions, check_runtime
from diffquant.onnx.runtime.device import cuda_notes
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.reports.tables import compare_size, format_size, stored_bits_per_weight
from diffquant.support.files import write_atomically
from diffquant.support.installation import versions
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, report_nothing
from diffquant.support.terminal import PrintableResult


@dataclass(frozen=True, repr=False)
class OnnxReport(PrintableResult):
    """Result of `export`.

    Attributes:
        destination: folder that was written.
        bytes_before: size of the checkpoint's weights in bytes.
        bytes_after: size of the model's two files in bytes.
        weights: number of the checkpoint's weights.
        seconds: duration of the export, calibration included.
        calibrated: part of `seconds` spent on calibrating the cache; 0 if ranges were given or the cache is not
            quantized.
        floor: oldest ONNX Runtime version that opens the model.
        notes: sentences for the user.
    """

    destination: Path
    bytes_before: int
    bytes_after: int
    weights: int
    seconds: float
    calibrated: float
    floor: str
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Return a few lines of text for the user."""
        calibration = f", {self.calibrated:.1f} s of them calibrating the cache" if self.calibrated else ""
        first = (
            f"{self.destination}: {compare_size(self.bytes_after, self.bytes_before, self.weights)}, "
            f"in {self.seconds:.1f} s{calibration}, for ONNX Runtime {self.floor} and later"
        )
        return "\n".join([first, *(f"  {note}" for note in self.notes)])


def export(
    source: Path | str | Source,
    destination: Path | str,
    options: ExportOptions | None = None,
    *,
    ranges: Ranges | Path | str | None = None,
    overwrite: bool = False,
    progress: Progress = report_nothing,
) -> OnnxReport:
    """Write a checkpoint as an ONNX model.

    Args:
        source: a folder of safetensors, quantized or not, or a .gguf file.
        destination: folder to create; it is written atomically.
        options: options of the export; by default float32 with a cache.
        ranges: calibrated ranges of a quantized cache, the file that `diffquant calibrate` wrote, or None if the
            cache is not quantized. The function `diffquant.calib.calibration.kv_cache.calibrate_cache` computes them on
            the bundled text.
        overwrite: replace an existing folder once the new one is complete.
        progress: called with the bytes written, the total, and the current tensor.

    Raises:
        DiffQuantError: the source, the options, the ranges or the destination are invalid; nothing is written then.
    """
    plan = check_and_plan_export(source, Path(destination), options or ExportOptions(), overwrite)
    return write_export(plan, Path(destination), ranges, overwrite, progress)


def write_export(
    plan: ExportPlan,
    destination: Path,
    ranges: Ranges | Path | str | None = None,
    overwrite: bool = False,
    progress: Progress = report_nothing,
) -> OnnxReport:
    """Write a planned export.

    Args:
        plan: result of `check_and_plan_export`.
        destination: folder to create; it is written atomically.
        ranges: as in `export`.
        overwrite: replace an existing folder once the new one is complete.
        progress: called with the bytes written, the total, and the current tensor.

    Raises:
        DiffQuantError: the ranges are invalid, or writing fails; no partial folder is left.
    """
    started, source, options = time.monotonic(), plan.source, plan.options
    if isinstance(ranges, Path | str):
        ranges = read_ranges(Path(ranges), source)
    scales = _cache_scales(source, options, ranges)
    decoder = plan.decoder(plan, scales)
    decoder.add_all_nodes()
    streamed = decoder.linears.streamed
    initializers, nbytes = assign_offsets(streamed, options.layout.data_name)
    model = decoder.model(decoder.linears.with_views(initializers))
    key = {
        "verb": "export",
        "source": checkpoint_key(source.checkpoint),
        "options": options.to_dict(),
        "ranges": ranges.digest if ranges else None,
    } | versions()
    with stage_output(destination, key, nbytes, overwrite) as staging:
        folder = staging.folder
        source.checkpoint.write_side_files(folder)
        _rewrite_tokenizer(source, folder / "tokenizer.json")
        layout = options.layout
        (folder / layout.model).parent.mkdir(exist_ok=True)
        write_data_file(folder / layout.data, streamed, initializers, nbytes, progress)
        onnx.save(model, folder / layout.model)
        if ranges is not None:
            write_ranges(folder / RANGES_FILE, ranges)
        left_out = write_descriptions(plan, streamed, folder)
        bytes_after = sum((folder / name).stat().st_size for name in (layout.model, layout.data))
    return OnnxReport(
        destination,
        source.checkpoint.stored_nbytes,
        bytes_after,
        source.weight_count,
        time.monotonic() - started,
        0.0,
        plan.oldest_runtime,
        (*_make_notes(plan, streamed), *_narrow_note(ranges), *left_out),
    )


def check_and_plan_export(
    source: Path | str | Source, destination: Path, options: ExportOptions, overwrite: bool
) -> ExportPlan:
    """Check the source, options and destination of an export, and return its plan.

    The ranges of a quantized cache are checked later, by `write_export`.

    Raises:
        DiffQuantError: the source, the options or the destination are invalid.
    """
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    check_runtime(options)
    opened = open_source(source)
    # Raises early if generation_config.json is damaged.
    opened.check_special_tokens()
    return plan_export(opened, options)


def _cache_scales(source: Source, options: ExportOptions, ranges: Ranges | None) -> dict[int, Scales]:
    """Return the scales of the quantized cache by layer; empty if the cache has the activations' type."""
    if options.kv_bits == 16:
        if ranges is not None:
            raise UsageError(
                f"{option_name('scales')} apply only to a quantized KV cache: also give "
                f"{option_name('kv', 8)} or {option_name('kv', 4)}"
            )
        return {}
    if ranges is None:
        raise UsageError(
            f"a {options.kv_bits}-bit KV cache needs calibrated ranges: pass ranges= with what "
            "diffquant.calib.calibration.kv_cache.calibrate_cache returns, or with diffquant calibrate's file"
        )
    ranges.check_model(source)
    return static_scales(source, options.kv_bits, ranges)


def _rewrite_tokenizer(source: Source, file: Path) -> None:
    """Rewrite tokenizer.json if transformers loads another tokenizer from the folder's files than from it alone.

    Programs that run exports read only tokenizer.json: they would split a token defined only in tokenizer_config.json.
    """
    if not file.exists():
        return
    try:
        backend = source.tokenizer.backend_tokenizer
    except (AttributeError, CheckpointError):
        return
    if json.loads(backend.to_str()) != json.loads(Tokenizer.from_file(str(file)).to_str()):
        write_atomically(file, backend.to_str(pretty=True))


def _make_notes(plan: ExportPlan, streamed: Sequence[StreamedTensor]) -> list[str]:
    """Return sentences for the report's reader, on sizes and on what the export does not contain."""
    options, notes = plan.options, []
    sizes = _scheme_sizes(plan, streamed)
    for scheme, (nbytes, weights) in sizes.items():
        container = container_bits(scheme)
        notes.append(
            f"weights {scheme}: {format_size(nbytes)}, {stored_bits_per_weight(nbytes, weights):.2f} stored bits each, "
            f"with scales in {options.dtype}"
        )
        if container != scheme.bits:
            notes[-1] += f" in {container}-bit containers, which hold them exactly"
    if options.accuracy_level == 1 and 4 not in map(container_bits, sizes):
        notes.append(f"{option_name('accuracy_level', 1)} has no effect: no weights have 2 to 4 bits")
    recipe = plan.source.recipe
    texts_by_target = {target: sorted(map(str, recipe.schemes_of(target))) for target in LAYER_TARGETS}
    kept = set() if options.kv_bits == 16 else {"k", "v"}
    kept |= {"logits"} if texts_by_target["logits"] == [str(options.logits)] else set()
    left_out = {target: texts for target, texts in texts_by_target.items() if texts != ["16"] and target not in kept}
    if left_out:
        schemes = ", ".join(f"{target} {' or '.join(texts)}" for target, texts in left_out.items())
        of_target = {"k": option_name("kv"), "v": option_name("kv"), "logits": option_name("logits")}
        given = dict.fromkeys(of_target[target] for target in left_out if target in of_target)
        hint = f"; give {' and '.join(given)} to round in the export, too" if given else ""
        notes.append(f"the checkpoint's recipe ({schemes}) is not part of the export{hint}")
    if inputs := recipe.rounding_texts("activations"):
        notes.append(
            f"ONNX Runtime rounds activations to 8 bits with one scale per block of a weight's columns, absmax / 127, "
            f"in place of the recipe's activations {' or '.join(inputs)}"
        )
    if options.kv_bits == 4:
        notes.append(
            f"KV cache of 4 bits: experimental; compare its quality with {option_name('kv', 8)} before relying on it"
        )
    if options.genai_device != "cpu":
        notes += cuda_notes(options.dtype, options.kv_bits, not options.logits.quantizes)
    if options.logits.quantizes:
        notes.append(f"logits {options.logits} are rounded in standard ops, which store whole attention maps")
    return notes


def _narrow_note(ranges: Ranges | None) -> Iterator[str]:
    """Yield a warning if the ranges lose much accuracy on the text that calibration held out."""
    held_out = ranges.settings.get("held_out") if ranges else None
    if held_out and (loss := held_out["loss"]) > CACHE_LIMIT:
        yield (
            f"warning: KV-cache calibration is too narrow in layer {held_out['layer']}: {loss:.3g}x the error of "
            f"fitted scales on text that it did not read (limit {CACHE_LIMIT:g}x); recalibrate on more text "
            f"(diffquant calibrate, then export with {option_name('scales')}) or export with {option_name('kv', 16)}"
        )


def _scheme_sizes(plan: ExportPlan, streamed: Sequence[StreamedTensor]) -> dict[Scheme, tuple[int, int]]:
    """Return each scheme's bytes of codes and scales, and its number of weights, sorted by the schemes' text."""
    nbytes = packed_bytes(streamed)
    matrices = [matrix for matrix in plan.matrices.values() if matrix.has_codes]
    return {
        scheme: (sum(nbytes[m.module] for m in alike), sum(m.elements for m in alike))
        for scheme in sorted({matrix.scheme for matrix in matrices}, key=str)
        for alike in [[matrix for matrix in matrices if matrix.scheme == scheme]]
    }
