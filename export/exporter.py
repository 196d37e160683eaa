"""The verb: a checkpoint, plain or quantized, becomes a folder that ONNX Runtime opens."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from diffquant.errors import UsageError
from diffquant.export.graph.cache_scales import calibrated_scales, calibration_windows, static_scales
from diffquant.export.graph.decoder import build
from diffquant.export.graph.external import DATA_FILE, MODEL_FILE
from diffquant.export.graph.linears import container_bits
from diffquant.export.graph.plan import ExportSource, Scales, check_source
from diffquant.export.graph.streaming import Streamed, place, write
from diffquant.export.manifest import write_manifest
from diffquant.export.options import ExportOptions, check_runtime, runtime_floor
from diffquant.export.runtime.genai import write_genai_config
from diffquant.export.runtime.session import OnnxModel
from diffquant.formats.atomic_folder import check_output, staged
from diffquant.formats.reader import Checkpoint, read_json
from diffquant.formats.row_stream import fingerprint
from diffquant.report.tables import megabytes
from diffquant.scheme import LAYER_TARGETS
from diffquant.source.ranges import read_ranges
from diffquant.source.source import Source, open_source
from diffquant.support.files import file_digest, write_atomically
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions


@dataclass(frozen=True)
class Report:
    """What a run of `export` did.

    Attributes:
        bytes_before: of the checkpoint's tensors.
        bytes_after: of the model's two files.
        seconds: of the run.
        floor: oldest ONNX Runtime that opens the model.
        notes: what a reader should know.
    """

    destination: Path
    bytes_before: int
    bytes_after: int
    seconds: float
    floor: str
    notes: tuple[str, ...]

    def summary(self) -> str:
        """A few lines for people."""
        share = self.bytes_after / max(1, self.bytes_before)
        first = (
            f"{self.destination}: {megabytes(self.bytes_before)} -> {megabytes(self.bytes_after)} ({share:.1%}) "
            f"in {self.seconds:.1f} s, for ONNX Runtime {self.floor} and later"
        )
        return "\n".join([first, *(f"  {note}" for note in self.notes)])


def export(
    source: Path | str | Source,
    destination: Path | str,
    options: ExportOptions | None = None,
    *,
    calibration: Sequence[Sequence[int]] | None = None,
    scales: Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Report:
    """Write a checkpoint as an ONNX model.

    Args:
        source: a folder of safetensors, plain or quantized by `quantize`, or a .gguf file.
        destination: the folder to make; it appears whole or not at all.
        options: float32 with a cache by default.
        calibration: token ids to find a quantized cache's scales on; the built-in prose by default.
        scales: of a quantized cache, from `diffquant calibrate` on this checkpoint; nothing is run to find them then.
        overwrite: replace an existing folder there, at the end.
        progress: called with bytes written, then with calibration windows.

    Raises:
        DiffQuantError: anything wrong with the source, the options or the destination; nothing is left then.
    """
    started = time.monotonic()
    destination = Path(destination)
    options = options or ExportOptions()
    check_output(source.path if isinstance(source, Source) else Path(source), destination, overwrite)
    check_runtime(options)
    if scales is not None and options.kv_bits == 16:
        raise UsageError("--scales are of a quantized KV cache: give --kv 8 or --kv 4 with them")
    opened = _open(source, options)
    found = calibrated_scales(opened, read_ranges(scales, opened.source)) if scales is not None else None
    if options.kv_bits < 16 and found is None and calibration is None:
        config = opened.adapter.config
        calibration = calibration_windows(opened.source, config.max_position_embeddings, config.vocab_size)
    model, streamed = build(opened, found)
    _, nbytes = place(streamed)
    key = {
        "verb": "export",
        "source": fingerprint(opened.source.checkpoint),
        "options": options.to_dict(),
        "scales": file_digest(scales) if scales is not None else None,
    } | versions()
    with staged(destination, key, nbytes, overwrite) as staging:
        folder = staging.folder
        opened.source.checkpoint.write_side_files(folder)
        write(folder / DATA_FILE, streamed, progress)
        if options.kv_bits < 16 and found is None and calibration is not None:
            _without_logits(model)
            onnx.save(model, folder / MODEL_FILE)
            model, _ = build(opened, _calibrate(opened, folder, calibration, progress))
        onnx.save(model, folder / MODEL_FILE)
        _describe(opened, folder)
        bytes_after = sum((folder / name).stat().st_size for name in (MODEL_FILE, DATA_FILE))
    return Report(
        destination,
        opened.source.checkpoint.nbytes,
        bytes_after,
        time.monotonic() - started,
        runtime_floor(options),
        tuple(_notes(opened, streamed)),
    )


def _open(path: Path | str | Source, options: ExportOptions) -> ExportSource:
    opened = open_source(path)
    if opened.packed and options.weights.quantizes:
        raise UsageError(
            f"{opened.path} holds quantized weights already: they are exported as they are; leave out --weights"
        )
    source = ExportSource(opened, options)
    check_source(source)
    return source


def _without_logits(model: onnx.ModelProto) -> None:
    """Leave the caches alone as outputs, and no node that only the logits needed: the head may be a quarter of all."""
    graph = model.graph
    graph.output.remove(next(value for value in graph.output if value.name == "logits"))
    needed = {value.name for value in graph.output}
    for node in reversed(list(graph.node)):
        if needed.isdisjoint(node.output):
            graph.node.remove(node)
        else:
            needed.update(node.input)


def _calibrate(
    source: ExportSource, folder: Path, windows: Sequence[Sequence[int]], progress: Progress
) -> dict[int, Scales]:
    """The cache's scales, from the model with a cache in the activations' type that lies in `folder`."""
    model = OnnxModel(folder, torch.get_num_threads())
    return static_scales(model, source.spec, source.options.kv_bits, windows, progress)


def _describe(source: ExportSource, folder: Path) -> None:
    """config.json, genai_config.json and diffquant.json."""
    config = source.adapter.config
    write_atomically(folder / "config.json", json.dumps(source.source.checkpoint.config, indent=2) + "\n")
    if source.options.cache:
        write_genai_config(folder, config)
    write_manifest(folder, source.options, _identity(source.source.checkpoint), _quantized(source))


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "bytes": checkpoint.nbytes,
        "sha256": {file.name: file_digest(file) for file in checkpoint.weight_files()},
        "origin_sha256": _origin(checkpoint),
    }


def _origin(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of what `quantize` made a checkpoint from; none where it did not write it."""
    record = checkpoint.path / "diffquant.json"
    return read_json(record).get("source", {}).get("sha256", {}) if record.is_file() else {}


def _quantized(source: ExportSource) -> dict[str, Any]:
    return {
        matrix.name: {
            "bits": matrix.scheme.bits,
            "stored_bits": container_bits(matrix.scheme),
            "granularity": matrix.scheme.granularity_text,
        }
        for matrix in source.matrices()
        if matrix.scheme.quantizes
    }


def _notes(source: ExportSource, streamed: Sequence[Streamed]) -> list[str]:
    options, notes = source.options, []
    schemes = {matrix.scheme for matrix in source.matrices() if matrix.scheme.quantizes}
    for scheme in sorted(schemes, key=str):
        stored = container_bits(scheme)
        size = sum(
            tensor.nbytes
            for matrix in source.matrices()
            for tensor in streamed
            if matrix.scheme == scheme and tensor.name.startswith(f"{matrix.module}.weight_")
        )
        fitted = "" if stored == scheme.bits else f" in {stored}-bit containers, which hold them exactly"
        notes.append(f"weights {scheme}: {megabytes(size)}, scales included{fitted}")
    recipe = source.source.recipe
    simulated = {target: sorted(map(str, recipe.schemes_of(target))) for target in LAYER_TARGETS}
    if any(schemes != ["16"] for schemes in simulated.values()):
        said = ", ".join(f"{target} {' or '.join(schemes)}" for target, schemes in simulated.items())
        notes.append(
            f"the checkpoint's recipe ({said}) is simulated by DiffTransformer; the exported cache and logits follow "
            "the options of this export alone"
        )
    if options.kv_bits == 4:
        notes.append("KV cache of 4 bits: experimental; compare its quality with --kv 8 before relying on it")
    if options.logits.quantizes:
        notes.append(f"logits {options.logits} are rounded by the graph's body in standard ops, which holds whole maps")
    return notes
