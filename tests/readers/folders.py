"""The folders that readers are given: each feature of an export, on models that ship and on random ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import diffquant.data
from diffquant.export import ExportOptions, export
from diffquant.export.files import model_file
from diffquant.export.graph.external import load_graph
from diffquant.export.manifest import read_manifest
from diffquant.export.verification.caches import cache_scales
from diffquant.export.verification.reference import Reference
from diffquant.source.source import open_source
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import cache_ranges

POCKET = Path(diffquant.data.__file__).parent / "pocket"
COUNT = 12
_TEXT = "The old man opened the door of the house, and"


@dataclass(frozen=True)
class Feature:
    """An export that readers may or may not be able to run.

    Attributes:
        source: a model that ships, or a random one.
        options: options of the export beside `portable`.
    """

    source: str
    options: dict[str, Any] = field(default_factory=dict)


_ALL = {"weights": "8:row", "kv_bits": 8, "embed_bits": 8}
FEATURES = {
    "float32": Feature("prose-diff-v1"),
    "8-bit cache": Feature("prose-diff-v2", {"kv_bits": 8}),
    "4-bit weights": Feature("prose-diff-v1", {"weights": "4:row"}),
    "8-bit embedding and head": Feature("prose-diff-v1", {"embed_bits": 8}),
    "8-bit logits": Feature("prose-diff-v2", {"logits": "8:row"}),
    "weights, cache, embedding and head at 8 bits": Feature("prose-diff-v1", _ALL),
    "random DiffLlama": Feature("diffllama"),
    "random V2, 4-bit cache": Feature("unilm-v2-half", {"kv_bits": 4}),
    "random grouped": Feature("motif-grouped"),
    "random V3": Feature("gated"),
    "random Transformer": Feature("llama"),
    "standard operators": Feature("prose-diff-v1", {"pure": True}),
    "standard operators, 8-bit cache": Feature("prose-diff-v2", {"pure": True, "kv_bits": 8}),
    "standard operators, all quantized": Feature(
        "prose-diff-v2", {"pure": True, **_ALL, "weights": "4:row", "logits": "8:row"}
    ),
    "standard operators, random V3": Feature("gated", {"pure": True}),
}


class Folder:
    """A feature's portable folder, written where it is first asked for, and the tokens that torch has for it."""

    def __init__(self, root: Path, name: str) -> None:
        self.feature = FEATURES[name]
        self._root = root / name.replace(",", "").replace(" ", "-")

    @cached_property
    def path(self) -> Path:
        """The folder."""
        self._root.mkdir(parents=True)
        options = ExportOptions.parse(portable=True, **self.feature.options)
        export(self._source, self._root / "out", options, ranges=cache_ranges(self._source, options))
        return self._root / "out"

    @property
    def file(self) -> Path:
        """The graph."""
        return model_file(self.path)

    @property
    def floor(self) -> tuple[int, ...]:
        """The oldest ONNX Runtime that the folder's record promises."""
        return tuple(int(part) for part in read_manifest(self.path).floor.removeprefix(">=").split("."))

    @cached_property
    def prompt(self) -> list[int]:
        """Tokens to continue."""
        file = self._source / "tokenizer.json"
        return Tokenizer.from_file(str(file)).encode(_TEXT).ids if file.is_file() else [3, 14, 15, 9, 26, 5, 35, 8]

    @cached_property
    def tokens(self) -> list[list[int]]:
        """What torch continues the prompt with, the same codes in weights and cache: with activations as they are, and
        rounded to 8 bits where ONNX Runtime rounds them, which it leaves to each build."""
        manifest = read_manifest(self.path)
        reference = Reference(open_source(self._source), manifest.options, cache_scales(load_graph(self.path)))
        both = []
        for rounds in (False, True):
            with reference.arithmetic(rounds=rounds):
                both.append(_continued(self.prompt, lambda ids: reference.run(ids)[0, -1].argmax()))
        return both

    @cached_property
    def _source(self) -> Path:
        pocket = POCKET / self.feature.source
        return pocket if pocket.is_dir() else write_checkpoint(self._root / "source", self.feature.source)


def _continued(prompt: list[int], likeliest: Callable[[np.ndarray], Any]) -> list[int]:
    ids = list(prompt)
    for _ in range(COUNT):
        ids.append(int(likeliest(np.array([ids]))))
    return ids[len(prompt) :]
