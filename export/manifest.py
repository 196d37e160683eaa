"""An export's record, diffquant.json: its checkpoint, its options, and its files' digests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.checkpoints.side_files import read_json
from diffquant.errors import CheckpointError, UsageError
from diffquant.onnx.files import RANGES_FILE, check_exported, layout_of
from diffquant.onnx.options import ExportOptions
from diffquant.support.digests import FileDigests
from diffquant.support.files import write_atomically

FILE = "diffquant.json"
FORMAT = "onnx"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An export's record, as diffquant.json in its folder contains it.

    Attributes:
        options: options of the export.
        floor: oldest ONNX Runtime version that opens the model, as ">=1.23".
        source: record of the checkpoint, with its "name" and "model_type".
        weights: digests of the checkpoint's weight files.
        origin: digests of the files that a quantized checkpoint was made from; empty if `quantize` did not make the
            checkpoint.
        tensors: for each quantized weight by name, its bits, container bits, stored bits (scales included) and
            granularity.
        files: digests of the model's files.
        calibration: digest of the calibrated ranges' file; empty if the cache is not quantized, or if an older version
            wrote the export.
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
    """Write diffquant.json into an exported folder whose other files are complete.

    Args:
        floor: oldest ONNX Runtime version that opens the model, such as "1.23".
        source: record of the checkpoint, as in `Manifest`.
        tensors: record of each quantized weight by name, as in `Manifest`.
    """
    # Imported here because it imports torch, which reading a record must not need.
    from diffquant.support.installation import versions

    layout = layout_of(folder)
    entry = {
        "format": FORMAT,
        "versions": versions(),
        "onnxruntime": f">={floor}",
        "options": options.to_dict(),
        "source": source,
        **FileDigests.within(folder, (layout.model, layout.data)).to_dict(),
        "calibration": FileDigests.compute(file for file in [folder / RANGES_FILE] if file.exists()).to_dict(),
        "tensors": tensors,
    }
    write_atomically(folder / FILE, json.dumps(entry, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read an exported folder's record.

    Raises:
        CheckpointError: the folder is not an export, or its record is missing or invalid.
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
    """Check that the digests of the model's files, and of its calibrated ranges, are those in the folder's record.

    Args:
        manifest: the folder's record.

    Raises:
        CheckpointError: some files were edited, damaged or removed after export; the message names them all.
    """
    changed = [*manifest.files.changed_files(folder), *manifest.calibration.changed_files(folder)]
    if changed:
        raise CheckpointError(
            f"{folder}: {', '.join(changed)} changed since export (its digest is not {FILE}'s); export the model again"
        )


def _options(recorded: Mapping[str, Any], folder: Path) -> ExportOptions:
    # Options of earlier versions: graphs of the first two are no longer supported, any opset is.
    retired = {"pure": False, "op": "custom"}
    if any(recorded.get(name, usual) != usual for name, usual in retired.items()):
        raise CheckpointError(
            f"{folder} was exported with --pure-onnx or --op flex, which no longer exist; export the model again"
        )
    return ExportOptions.parse(**{name: value for name, value in recorded.items() if name not in (*retired, "opset")})


def _origin(source: Mapping[str, Any]) -> FileDigests:
    # Versions that wrote only SHA-256 digests used the key "origin_sha256".
    older = {"sha256": source["origin_sha256"]} if "origin_sha256" in source else {}
    return FileDigests.read(source.get("origin", older))
