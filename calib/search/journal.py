"""A journal of measurements that an interruption does not lose: a line each, under a key of all they depend on."""

import hashlib
import json
from pathlib import Path
from typing import Any

from diffquant.support.files import write_atomically


class Journal:
    """Results by name, each of which is on the disk before the next is measured."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        self.path = folder / f"measured-{digest}.jsonl"
        self._results: dict[str, Any] = {}
        self._key = key
        if not self.path.is_file():
            return
        # A run that was killed may have left half a line: it is dropped.
        complete_lines = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        write_atomically(self.path, complete_lines + "\n")
        for line in complete_lines.splitlines()[1:]:
            entry = json.loads(line)
            self._results[entry["name"]] = entry["result"]

    def get(self, name: str) -> Any:
        """The result of a measurement; None where it was not made."""
        return self._results.get(name)

    def add(self, name: str, result: Any) -> None:
        """Write a result down."""
        self._results[name] = result
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"key": self._key}) + "\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "result": result}) + "\n")

    def __len__(self) -> int:
        return len(self._results)
