"""A journal that keeps measurements over an interruption: a line each, under a key of everything they depend on."""

import json
from pathlib import Path
from typing import Any

from diffquant.support.files import set_folder_aside, write_atomically
from diffquant.support.plain_data import JsonObject, parse_json, plain_digest


class Journal:
    """Results by name, each on disk before the next is measured.

    Each line holds a SHA-256 of itself and the key. A damaged line, for instance half a line from a killed run, is
    dropped, so its measurement is made again.
    """

    def __init__(self, folder: Path, key: JsonObject) -> None:
        self.path = folder / f"measured-{plain_digest(key)[:12]}.jsonl"
        self._results: JsonObject = {}
        self._key = key
        if not self.path.is_file():
            return
        for line in self.path.read_bytes().split(b"\n")[1:]:
            self._take(line)
        sound_lines = [self._line(name, result) for name, result in self._results.items()]
        write_atomically(self.path, "".join([self._header(), *sound_lines]))

    def get(self, name: str) -> Any:
        """The result of a measurement, or None if it was not made yet."""
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

    def _take(self, line: bytes) -> None:
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
        return plain_digest([self._key, name, result])
