"""Checks that a run's output replaces only diffquant's own files, and keeps a journal to resume interrupted runs."""

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import OutputExistsError
from diffquant.support.files import check_writable, read_bytes, set_folder_aside, write_atomically
from diffquant.support.names import first_few
from diffquant.support.plain_data import JsonObject, parse_json, plain_data_digest

# Files of a checkpoint or an export, which no run writes.
_OF_MODELS = ("config.json", "model.safetensors", "model.onnx")


def check_replaceable(folder: Path, replaced: Iterable[str], own: Collection[str]) -> None:
    """Check that diffquant wrote everything that an output would replace in a folder.

    Args:
        replaced: names that already exist and would be replaced.
        own: names that diffquant is known to have written.

    Raises:
        OutputExistsError: a name in `replaced` is not in `own`.
    """
    foreign = sorted(set(replaced) - set(own))
    if foreign:
        raise OutputExistsError(
            f"{folder} holds {first_few(foreign, ', ')}, which diffquant did not write; "
            "they are not overwritten: move them or choose another output"
        )


@dataclass(frozen=True)
class RunFiles:
    """The files that a run writes into a folder, which may hold other files.

    Attributes:
        data: name of the JSON file with the numbers, which identifies a run.
        fields: names that the object in this JSON file must have.
        beside: names of the other files, which are made from the JSON file.
        joins_models: whether the run may be written into a model's folder.
    """

    data: str
    fields: frozenset[str]
    beside: tuple[str, ...]
    joins_models: bool = False

    def check(self, folder: Path) -> None:
        """Check in advance that these files can be written and replace only those of an earlier run.

        Raises:
            OutputExistsError: files with these names exist that no run wrote, or the folder contains a model and
                `joins_models` is False.
            UsageError: the folder cannot be written.
        """
        check_writable(folder)
        if not (self.joins_models or self.is_run(folder)) and any((folder / name).exists() for name in _OF_MODELS):
            raise OutputExistsError(f"{folder} is a model's folder; choose another output")
        there = [name for name in (self.data, *self.beside) if os.path.lexists(folder / name)]
        check_replaceable(folder, there, there if self.is_run(folder) else ())

    def is_run(self, folder: Path) -> bool:
        """Return whether a folder holds the JSON file of a run, with its fields."""
        return has_fields(folder / self.data, self.fields)


def has_fields(file: Path, fields: Collection[str]) -> bool:
    """Return whether a file is a JSON object that has these names."""
    try:
        data = parse_json(read_bytes(file))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= set(fields)


def check_output_file(file: Path, is_own: bool) -> None:
    """Check that a file can be written, and that it would not replace a file that diffquant did not write.

    Args:
        is_own: whether diffquant wrote the existing file, if there is one.

    Raises:
        OutputExistsError: the file exists and `is_own` is False.
        UsageError: its folder cannot be written.
    """
    check_writable(file.absolute().parent)
    check_replaceable(
        file.absolute().parent, [file.name] if os.path.lexists(file) else [], [file.name] if is_own else []
    )


class Journal:
    """A file with the results of measurements by name, each written to disk before the next is measured.

    Each line holds a result and a SHA-256. A damaged line, for instance half a line from a killed run, is dropped, so
    its measurement is made again.

    Args:
        folder: folder of the file.
        key: plain data on which the results depend. A hash of it is in the file's name, so a journal with another key
            is another file.
    """

    def __init__(self, folder: Path, key: JsonObject) -> None:
        self.path = folder / f"measured-{plain_data_digest(key)[:12]}.jsonl"
        self._results: JsonObject = {}
        self._key = key
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().split(b"\n")[1:]:
            self._read_line(line)
        sound_lines = [self._line(name, result) for name, result in self._results.items()]
        write_atomically(self.path, "".join([self._header(), *sound_lines]))

    def get(self, name: str) -> Any:
        """Return the result of a measurement, or None if it was not made yet."""
        return self._results.get(name)

    def add(self, name: str, result: Any) -> None:
        """Append a result."""
        self._results[name] = result
        if not self.path.is_file():
            set_folder_aside(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self._header())
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(name, result))

    def discard(self) -> None:
        """Delete the file once its results are stored elsewhere."""
        self.path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._results)

    def _read_line(self, line: bytes) -> None:
        try:
            entry = parse_json(line)
            name, result = entry["name"], entry["result"]
            if isinstance(name, str) and entry["sha256"] == self._digest(name, result):
                self._results[name] = result
        except (ValueError, LookupError, TypeError):
            pass

    def _header(self) -> str:
        return json.dumps({"key": self._key}) + "\n"

    def _line(self, name: str, result: Any) -> str:
        return json.dumps({"name": name, "result": result, "sha256": self._digest(name, result)}) + "\n"

    def _digest(self, name: str, result: Any) -> str:
        return plain_data_digest([self._key, name, result])
