"""The record of an export, diffquant.json: what the folder was made of and how, and its files' digests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError, UsageError
from diffquant.export.files import DATA_FILE, MODEL_FILE
from diffquant.export.options import ExportOptions, runtime_floor
from diffquant.formats.reader import read_json
from diffquant.support.files import file_digest, write_atomically
from diffquant.support.versions import versions

FILE = "diffquant.json"
FORMAT = "onnx"


@dataclass(frozen=True)
class Manifest:
    """An export's record.

    Attributes:
        options: options of the export.
        floor: oldest ONNX Runtime that opens the model.
        source: record of the checkpoint: "name", "model_type", "sha256" of its weight files, and "origin_sha256" of
            those that a quantized checkpoint was made from.
        tensors: bits, container bits, stored bits (scales included) and granularity of each quantized weight, by name.
        sha256: digests of the model's files by name.
    """

    options: ExportOptions
    floor: str
    source: Mapping[str, Any]
    tensors: Mapping[str, Any]
    sha256: Mapping[str, str]


def write_manifest(folder: Path, options: ExportOptions, source: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write the record of a finished folder."""
    entry = {
        "format": FORMAT,
        "versions": versions(),
        "onnxruntime": f">={runtime_floor(options)}",
        "options": options.to_dict(),
        "source": source,
        "sha256": {name: file_digest(folder / name) for name in (MODEL_FILE, DATA_FILE)},
        "tensors": tensors,
    }
    write_atomically(folder / FILE, json.dumps(entry, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """An exported folder's record.

    Raises:
        CheckpointError: the folder has no record, or one that cannot be read.
    """
    if not (folder / MODEL_FILE).is_file():
        raise CheckpointError(f"{folder} has no {MODEL_FILE}; `diffquant export` makes such a folder")
    entry = read_json(folder / FILE)
    try:
        return Manifest(
            ExportOptions.from_dict(entry["options"]),
            entry["onnxruntime"],
            entry["source"],
            entry["tensors"],
            entry["sha256"],
        )
    except (KeyError, TypeError, UsageError) as error:
        raise CheckpointError(f"{folder / FILE} is not an export's record ({error}); export the model again") from error


def check_unchanged(folder: Path, manifest: Manifest) -> None:
    """Compare a folder's files with the digests in its record.

    Raises:
        CheckpointError: some were edited, damaged or removed after export; the message names them all.
    """
    changed = [
        name
        for name, digest in manifest.sha256.items()
        if not (folder / name).is_file() or file_digest(folder / name) != digest
    ]
    if changed:
        raise CheckpointError(
            f"{folder}: {', '.join(changed)} changed since export (SHA-256 differs from {FILE}); export the model again"
        )
