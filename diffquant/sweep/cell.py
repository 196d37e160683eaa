"""Cells: measurements on disk, addressed by a hash of everything that determines them."""

import hashlib
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffquant.support.files import read_bytes, set_folder_aside, write_atomically
from diffquant.support.plain_data import JsonObject, parse_json, plain_digest
from diffquant.sweep.measurement import Measurement


@dataclass(frozen=True)
class Cell:
    """A measurement's place on disk.

    Attributes:
        folder: folder of the sweep's cells.
        key: everything that the measurement depends on, as plain data.
    """

    folder: Path
    key: JsonObject

    @property
    def address(self) -> str:
        """SHA-256 of the key."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()

    @cached_property
    def name(self) -> str:
        """Name of the cell's files, without suffix."""
        return self.address[:32]

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def failure_path(self) -> Path:
        return self.folder / f"{self.name}.failed.json"

    def read(self) -> Measurement | None:
        """The stored measurement, or None if there is none or its file is damaged."""
        try:
            entry = parse_json(read_bytes(self.path))
            if entry["key"] != self.key or entry["sha256"] != plain_digest(entry["result"]):
                return None
            return Measurement.from_dict(entry["result"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def write(self, measurement: Measurement) -> None:
        """Write a measurement, and remove the record of an earlier failure."""
        result = measurement.to_dict()
        entry = {"key": self.key, "result": result, "sha256": plain_digest(result)}
        _put(self.path, entry)
        set_folder_aside(self.failure_path)
        self.failure_path.unlink(missing_ok=True)

    @contextmanager
    def settled(self) -> Iterator[list[Measurement]]:
        """Write the measurement that is put into the list, or record the error that is raised instead."""
        measured: list[Measurement] = []
        try:
            yield measured
        except Exception as error:
            first_line = str(error).split("\n", 1)[0] or type(error).__name__
            trace = "".join(traceback.format_exception(error)).splitlines()
            entry = {"key": self.key, "error": first_line, "trace": trace}
            _put(self.failure_path, entry)
        else:
            self.write(*measured)

    def read_failure(self) -> str | None:
        """The error of the last attempt in one line, or None if no failure is recorded."""
        try:
            return str(parse_json(read_bytes(self.failure_path))["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def _put(path: Path, entry: JsonObject) -> None:
    set_folder_aside(path)
    write_atomically(path, json.dumps(entry, indent=1) + "\n")
