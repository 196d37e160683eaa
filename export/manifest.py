"""diffquant.json of an exported folder: what it was made of and how, and its files' digests."""

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
        source: "name", "model_type" and "sha256" of the checkpoint's weight files; "origin_sha256" of those a
            quantized checkpoint was made from.
        tensors: bits, container bits and granularity of each quantized weight.
        sha256: digests of the model's files by name.
    """

    options: ExportOptions
    floor: str
    source: Mapping[str, Any]
    tensors: Mapping[str, Any]
    sha256: Mapping[str, str]


def write_manifest(folder: Path, options: ExportOptions, source: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Describe a finished folder."""
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
        CheckpointError: there is none, or it cannot be read.
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
    """Compare the files with their digests.

    Raises:
        CheckpointError: naming every file that was edited, damaged or removed after export.
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
