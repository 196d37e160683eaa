"""The record of an export, diffquant.json: what the folder was made of and how, and its files' digests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError, UsageError
from diffquant.export.files import RANGES_FILE, check_exported, layout_of
from diffquant.export.options import ExportOptions
from diffquant.formats.json_object import read_json
from diffquant.support.digests import FileDigests
from diffquant.support.files import write_atomically

FILE = "diffquant.json"
FORMAT = "onnx"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An export's record.

    Attributes:
        options: options of the export.
        floor: oldest ONNX Runtime that opens the model.
        source: "name" and "model_type" of the checkpoint.
        weights: digests of the checkpoint's weight files.
        origin: digests of the files that a quantized checkpoint was made from; none where `quantize` did not make it.
        tensors: bits, container bits, stored bits (scales included) and granularity of each quantized weight, by name.
        files: digests of the model's files.
        calibration: digest of the ranges that the quantized cache's scales were made of; none for a cache in the
            activations' type, and in exports that older versions wrote.
    """

    options: ExportOptions
    floor: str
    source: Mapping[str, Any]
    weights: FileDigests
    origin: FileDigests
    tensors: Mapping[str, Any]
    files: FileDigests
    calibration: FileDigests


def write_manifest(
    folder: Path, options: ExportOptions, floor: str, source: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    """Write the record of a finished folder; `floor` is the oldest ONNX Runtime that opens it."""
    # Here, since it imports torch, without which a record is read.
    from diffquant.support.versions import versions

    layout = layout_of(folder)
    entry = {
        "format": FORMAT,
        "versions": versions(),
        "onnxruntime": f">={floor}",
        "options": options.to_dict(),
        "source": source,
        **FileDigests.within(folder, (layout.model, layout.data)).to_dict(),
        "calibration": FileDigests.of(file for file in [folder / RANGES_FILE] if file.exists()).to_dict(),
        "tensors": tensors,
    }
    write_atomically(folder / FILE, json.dumps(entry, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """An exported folder's record.

    Raises:
        CheckpointError: the folder has no record, or one that cannot be read.
    """
    check_exported(folder)
    entry = read_json(folder / FILE)
    try:
        return Manifest(
            options=_options(entry["options"], folder),
            floor=entry["onnxruntime"],
            source=entry["source"],
            weights=FileDigests.read(entry["source"]),
            origin=_origin(entry["source"]),
            tensors=entry["tensors"],
            files=FileDigests.read(entry),
            calibration=FileDigests.read(entry.get("calibration", {})),
        )
    except (KeyError, TypeError, UsageError) as error:
        raise CheckpointError(f"{folder / FILE} is not an export's record ({error}); export the model again") from error


def check_unchanged(folder: Path, manifest: Manifest) -> None:
    """Compare the model's files, and the ranges of its cache, with the digests in the folder's record.

    Raises:
        CheckpointError: some were edited, damaged or removed after export; the message names them all.
    """
    changed = [*manifest.files.changed(folder), *manifest.calibration.changed(folder)]
    if changed:
        raise CheckpointError(
            f"{folder}: {', '.join(changed)} changed since export (its digest is not {FILE}'s); export the model again"
        )


def _options(recorded: Mapping[str, Any], folder: Path) -> ExportOptions:
    # Forms that earlier versions wrote; their graphs are not read any more.
    retired = {"pure": False, "op": "custom"}
    if any(recorded.get(name, usual) != usual for name, usual in retired.items()):
        raise CheckpointError(
            f"{folder} was exported with --pure-onnx or --op flex, which no longer exist; export the model again"
        )
    return ExportOptions.parse(**{name: value for name, value in recorded.items() if name not in retired})


def _origin(source: Mapping[str, Any]) -> FileDigests:
    # Where digests were SHA-256 alone, the entry was named for them.
    older = {"sha256": source["origin_sha256"]} if "origin_sha256" in source else {}
    return FileDigests.read(source.get("origin", older))
