"""A checkpoint, plain or quantized, becomes a folder that ONNX Runtime opens."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from tokenizers import Tokenizer

from diffquant.errors import CheckpointError, UsageError
from diffquant.export.card import exported_card
from diffquant.export.files import RANGES_FILE
from diffquant.export.graph.build import build
from diffquant.export.graph.cache_scales import Scales, static_scales
from diffquant.export.graph.linears import container_bits
from diffquant.export.graph.plan import ExportPlan, plan_export
from diffquant.export.graph.streaming import Streamed, place, write
from diffquant.export.manifest import write_manifest
from diffquant.export.options import ExportOptions, check_runtime
from diffquant.export.runtime import genai, web
from diffquant.export.runtime.device import cuda_notes
from diffquant.export.runtime.portable import portable_config
from diffquant.formats.atomic_folder import check_output, staged
from diffquant.formats.json_object import read_json
from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import checkpoint_stamp
from diffquant.quantization.descriptions import note_left_out
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.report.sizes import compared_size, stored_bits
from diffquant.report.tables import megabytes
from diffquant.scheme import Scheme
from diffquant.serve.folder import remove_code_files
from diffquant.serve.foreign_code import leave_out_code
from diffquant.source.ranges import Ranges, read_ranges, write_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.digests import FileDigests
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, silent
from diffquant.support.readable import Readable
from diffquant.support.spelling import spelled
from diffquant.support.versions import versions
from diffquant.text.special_tokens import read_special_tokens


@dataclass(frozen=True, repr=False)
class OnnxReport(Readable):
    """The outcome of `export`.

    Attributes:
        destination: folder that was written.
        bytes_before: bytes that the checkpoint takes.
        bytes_after: size of the model's two files.
        weights: number of the checkpoint's weights.
        seconds: duration of the run, calibration included.
        calibrated: seconds of it that the cache's scales took; 0 where they were given or there are none.
        floor: oldest ONNX Runtime that opens the model.
        notes: sentences that a reader should know.
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
        """A few lines for people."""
        calibration = f", {self.calibrated:.1f} s of them calibrating the cache" if self.calibrated else ""
        first = (
            f"{self.destination}: {compared_size(self.bytes_after, self.bytes_before, self.weights)}, "
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
    progress: Progress = silent,
) -> OnnxReport:
    """Write a checkpoint as an ONNX model.

    Args:
        source: a folder of safetensors, plain or quantized by `quantize`, or a .gguf file.
        destination: the folder to make; it appears whole or not at all.
        options: float32 with a cache by default.
        ranges: calibrated ranges of a quantized cache, or the file `diffquant calibrate` wrote of them. The function
            `diffquant.calib.calibration.kv_cache.calibrate_cache` finds some on the built-in prose.
        overwrite: replace an existing folder there, at the end.
        progress: called with bytes written.

    Raises:
        DiffQuantError: anything wrong with the source, the options, the ranges or the destination; nothing is left
            then.
    """
    plan = check_export(source, Path(destination), options or ExportOptions(), overwrite)
    return write_export(plan, Path(destination), ranges, overwrite, progress)


def write_export(
    plan: ExportPlan,
    destination: Path,
    ranges: Ranges | Path | str | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> OnnxReport:
    """Write what `check_export` planned.

    Raises:
        DiffQuantError: anything wrong with the ranges; nothing is left then.
    """
    started, checked, options = time.monotonic(), plan.source, plan.options
    if isinstance(ranges, Path | str):
        ranges = read_ranges(Path(ranges), checked)
    scales = _cache_scales(checked, options, ranges)
    model, streamed = build(plan, scales)
    _, nbytes = place(streamed)
    key = {
        "verb": "export",
        "source": checkpoint_stamp(checked.checkpoint),
        "options": options.to_dict(),
        "ranges": ranges.digest if ranges else None,
    } | versions()
    with staged(destination, key, nbytes, overwrite) as staging:
        folder = staging.folder
        checked.checkpoint.write_side_files(folder)
        _settle_tokenizer(checked, folder / "tokenizer.json")
        layout = options.layout
        (folder / layout.model).parent.mkdir(exist_ok=True)
        write(folder / layout.data, streamed, progress)
        onnx.save(model, folder / layout.model)
        if ranges is not None:
            write_ranges(folder / RANGES_FILE, ranges)
        left_out = _write_descriptions(plan, streamed, folder)
        bytes_after = sum((folder / name).stat().st_size for name in (layout.model, layout.data))
    return OnnxReport(
        destination,
        checked.checkpoint.stored_nbytes,
        bytes_after,
        checked.weights,
        time.monotonic() - started,
        0.0,
        plan.floor,
        (*_make_notes(plan, streamed), *left_out),
    )


def check_export(source: Path | str | Source, destination: Path, options: ExportOptions, overwrite: bool) -> ExportPlan:
    """The plan of an export, checked in all that needs no ranges.

    Raises:
        DiffQuantError: as `export` raises it.
    """
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    check_runtime(options)
    opened = open_source(source)
    # A damaged generation_config.json is refused before the work.
    read_special_tokens(opened.path, opened.checkpoint.config)
    return plan_export(opened, options)


def _cache_scales(source: Source, options: ExportOptions, ranges: Ranges | None) -> dict[int, Scales]:
    """Scales of the quantized cache by layer; none for a cache in the activations' type."""
    if options.kv_bits == 16:
        if ranges is not None:
            raise UsageError(
                f"{spelled('scales')} are of a quantized KV cache: give {spelled('kv', 8)} or {spelled('kv', 4)} with "
                "them"
            )
        return {}
    if ranges is None:
        raise UsageError(
            f"a {options.kv_bits}-bit KV cache needs calibrated ranges: pass ranges= with what "
            "diffquant.calib.calibration.kv_cache.calibrate_cache returns, or with diffquant calibrate's file"
        )
    ranges.check_model(source)
    return static_scales(source, options.kv_bits, ranges)


def _settle_tokenizer(source: Source, file: Path) -> None:
    """Write into tokenizer.json, all that readers of exports read, what transformers makes of the tokenizer's files.

    They would cut a token that stands in tokenizer_config.json alone into pieces.
    """
    if not file.exists():
        return
    try:
        backend = source.tokenizer.backend_tokenizer
    except (AttributeError, CheckpointError):
        return
    if json.loads(backend.to_str()) != json.loads(Tokenizer.from_file(str(file)).to_str()):
        write_atomically(file, backend.to_str(pretty=True))


def _write_descriptions(plan: ExportPlan, streamed: Sequence[Streamed], folder: Path) -> tuple[str, ...]:
    """Write config.json, genai_config.json, web.json, the card and diffquant.json; notes on code that was left out."""
    checkpoint, tokens = plan.source.checkpoint, plan.source.special_tokens
    config, left_out = leave_out_code(folder, checkpoint.config)
    config.pop("diff_model", None)
    left_out += remove_code_files(folder)
    if plan.options.portable:
        config = portable_config(plan, tokens)
    # A checkpoint may leave it to its family's default.
    config |= {"max_position_embeddings": plan.config.max_position_embeddings}
    descriptions = {"config.json": config}
    if plan.options.cache:
        descriptions[genai.FILE] = genai.genai_config(plan, tokens)
    if plan.options.web:
        descriptions[web.FILE] = web.web_description(plan.config, tokens)
    for name, description in descriptions.items():
        write_atomically(folder / name, json.dumps(description, indent=2) + "\n")
    write_atomically(folder / "README.md", exported_card(plan))
    write_manifest(folder, plan.options, plan.floor, _source_record(checkpoint), _tensor_records(plan, streamed))
    return note_left_out(left_out, folder)


def _source_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Entry of diffquant.json about the checkpoint."""
    return {
        "name": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "bytes": checkpoint.stored_nbytes,
        **FileDigests.of(checkpoint.weight_files()).to_dict(),
        "origin": _origin_digests(checkpoint).to_dict(),
    }


def _origin_digests(checkpoint: Checkpoint) -> FileDigests:
    """Digests of the files that `quantize` made a checkpoint from; none where it did not write it."""
    record = checkpoint.path / "diffquant.json"
    try:
        return FileDigests.read(read_json(record).get("source", {}) if record.is_file() else {})
    except TypeError as error:
        raise CheckpointError(f"{record} is not a record of diffquant's ({error}); quantize the model again") from error


def _tensor_records(plan: ExportPlan, streamed: Sequence[Streamed]) -> dict[str, Any]:
    """Entry of diffquant.json about each quantized weight, by name."""
    nbytes = _packed_bytes(streamed)
    return {
        name: {
            "bits": matrix.scheme.bits,
            "container_bits": container_bits(matrix.scheme),
            "stored_bits": round(stored_bits(nbytes[matrix.module], matrix.elements), 4),
            "granularity": matrix.scheme.granularity_text,
        }
        for name, matrix in plan.matrices.items()
        if matrix.has_codes
    }


def _make_notes(plan: ExportPlan, streamed: Sequence[Streamed]) -> list[str]:
    """Sentences that a reader of the report should know."""
    options, notes = plan.options, []
    for scheme, (nbytes, weights) in _scheme_sizes(plan, streamed).items():
        container = container_bits(scheme)
        notes.append(
            f"weights {scheme}: {megabytes(nbytes)}, {stored_bits(nbytes, weights):.2f} stored bits each, "
            f"with scales in {options.dtype}"
        )
        if container != scheme.bits:
            notes[-1] += f" in {container}-bit containers, which hold them exactly"
    recipe = plan.source.recipe
    texts_by_target = {target: sorted(map(str, recipe.schemes_of(target))) for target in LAYER_TARGETS}
    kept = set() if options.kv_bits == 16 else {"k", "v"}
    simulated = {target: texts for target, texts in texts_by_target.items() if texts != ["16"] and target not in kept}
    if simulated:
        schemes = ", ".join(f"{target} {' or '.join(texts)}" for target, texts in simulated.items())
        notes.append(
            f"the checkpoint's recipe ({schemes}) is simulated by DiffTransformer, and no part of the export; give "
            f"{spelled('kv')} or {spelled('logits')} to have it"
        )
    if options.kv_bits == 4:
        notes.append(
            f"KV cache of 4 bits: experimental; compare its quality with {spelled('kv', 8)} before relying on it"
        )
    if options.genai_device != "cpu":
        notes += cuda_notes(options.dtype, options.kv_bits, not options.logits.quantizes)
    if options.logits.quantizes:
        notes.append(f"logits {options.logits} are rounded by the graph's body in standard ops, which holds whole maps")
    return notes


def _scheme_sizes(plan: ExportPlan, streamed: Sequence[Streamed]) -> dict[Scheme, tuple[int, int]]:
    """Bytes of codes and scales of each scheme, and the number of their weights, in the order of the schemes' texts."""
    nbytes = _packed_bytes(streamed)
    matrices = [matrix for matrix in plan.matrices.values() if matrix.has_codes]
    return {
        scheme: (sum(nbytes[m.module] for m in alike), sum(m.elements for m in alike))
        for scheme in sorted({matrix.scheme for matrix in matrices}, key=str)
        for alike in [[matrix for matrix in matrices if matrix.scheme == scheme]]
    }


def _packed_bytes(streamed: Sequence[Streamed]) -> dict[str, int]:
    """Bytes of each module's codes and scales."""
    nbytes: dict[str, int] = defaultdict(int)
    for tensor in streamed:
        nbytes[tensor.name.rpartition(".weight_")[0]] += tensor.nbytes
    return nbytes
