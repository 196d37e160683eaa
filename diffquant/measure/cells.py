"""Configurations of models, and cells: one task on one configuration, with its file and its result. No torch here."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from diffquant.measure.results import TaskResult
from diffquant.recipe import Recipe
from diffquant.support.files import read_bytes, set_folder_aside, write_atomically
from diffquant.support.plain_data import JsonObject, parse_json, plain_data_digest

# Names used as a target: for an exported folder, which is measured in its own precision, and for a recipe from a file.
EXPORTED, RECIPE = "onnx", "recipe"

TITLES = {
    "logits": "attention logits",
    "kv": "KV cache",
    "k": "keys",
    "v": "values",
    "qk": "queries and keys",
    "p": "softmax weights",
    "pv": "values before P·V",
}


@dataclass(frozen=True)
class SweepPoint:
    """A configuration of a model: what is quantized, and how.

    Attributes:
        model: path of the checkpoint, or of an exported folder.
        target: name of what is quantized; "" at 16 bits, `RECIPE` for a recipe file, `EXPORTED` for an exported folder.
        bits: width of the target's codes in bits; 16 at 16 bits, 0 for a recipe file.
        granularity: granularity in a scheme's notation, such as "row:shift"; a recipe's name; the precision of an
            exported folder as text; or "" at 16 bits.
        recipe: recipe to simulate; empty for an exported folder.
        compared_with: path of the model whose 16-bit results are the baseline, or None if there is no baseline.
    """

    model: Path
    target: str
    bits: int
    granularity: str
    recipe: Recipe
    compared_with: Path | None

    @property
    def is_baseline(self) -> bool:
        return not self.target

    @property
    def scheme_text(self) -> str:
        """The scheme as text, such as "4:row", "16", or a recipe's name."""
        if self.target in (EXPORTED, RECIPE):
            return self.granularity
        return f"{self.bits}:{self.granularity}" if self.granularity else str(self.bits)

    @property
    def title(self) -> str:
        """The quantized target in words, such as "attention logits"."""
        return TITLES.get(self.target, self.target)

    @property
    def granularity_words(self) -> str:
        """The granularity in words, such as "per row with shift" or "per group of 32"; "" without a granularity."""
        if self.target in (EXPORTED, RECIPE):
            return ""
        if self.granularity == "static":
            return "static"
        shared, _, form = self.granularity.partition(":")
        shared = f"group of {shared[1:]}" if shared[:1] == "g" and shared[1:].isdigit() else shared
        return f"per {shared}" + ({"": "", "rotated": ", rotated"}.get(form, f" with {form}"))

    @property
    def panel(self) -> str:
        """Title of the configuration's plot panel, such as "attention logits, per row with shift"."""
        return ", ".join(filter(None, (self.title, self.granularity_words)))

    @property
    def label(self) -> str:
        """Target and scheme, such as "logits 4:row", or "16 bits"."""
        return f"{self.target} {self.scheme_text}" if self.target else "16 bits"


@dataclass(frozen=True)
class Cell:
    """One measurement of a sweep: a configuration, a task and, once it was measured, the result.

    Attributes:
        task: name of the task.
        result: result of the task, or None if it failed or was not measured.
        error: error message if the measurement failed, otherwise None.
        key: everything that the result depends on, as plain data; a hash of it names the cell's files. In a cell that
            was read from sweep.json, the key has only "code", a digest of the code, or None if the file is old.
        folder: folder that holds the files of all cells.
    """

    point: SweepPoint
    task: str
    result: TaskResult | None = None
    error: str | None = None
    key: JsonObject = field(default_factory=dict)
    folder: Path = Path()

    @property
    def caption(self) -> str:
        return f"{self.point.model.name}, {self.point.label}, {self.task}"

    @property
    def weights_key(self) -> tuple[Path, str]:
        """The model's path and the recipe's weight schemes as text, which determine the weights to load."""
        return self.point.model, weight_schemes_text(self.point.recipe)

    @cached_property
    def name(self) -> str:
        """Name of the cell's files, without suffix."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def failure_path(self) -> Path:
        return self.folder / f"{self.name}.failed.json"

    @property
    def lock_path(self) -> Path:
        return self.folder / f"{self.name}.lock"

    def read(self) -> TaskResult | None:
        """Return the stored result, or None if its file is missing, damaged or of another cell."""
        try:
            entry = parse_json(read_bytes(self.path))
            if entry["key"] != self.key or entry["sha256"] != plain_data_digest(entry["result"]):
                return None
            return TaskResult.from_dict(entry["result"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def write(self, result: TaskResult) -> None:
        """Store a result, and remove the record of an earlier failure."""
        content = result.to_cell()
        entry = {"key": self.key, "result": content, "sha256": plain_data_digest(content)}
        _put(self.path, entry)
        set_folder_aside(self.failure_path)
        self.failure_path.unlink(missing_ok=True)

    def write_failure(self, error: str, trace: Sequence[str] = ()) -> None:
        """Write a one-line error message, and the lines of its traceback, to `failure_path`."""
        _put(self.failure_path, {"key": self.key, "error": error, "trace": list(trace)})

    def read_failure(self) -> str | None:
        """Return the error message that `write_failure` wrote last, or None if there is none."""
        try:
            return str(parse_json(read_bytes(self.failure_path))["error"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def weight_schemes_text(recipe: Recipe) -> str:
    """Return a recipe's weight schemes as text; recipes with equal texts can share a loaded model."""
    return Recipe().with_weights_of(recipe).to_yaml()


def _put(path: Path, entry: JsonObject) -> None:
    set_folder_aside(path)
    write_atomically(path, json.dumps(entry, indent=1) + "\n")
