"""The folders that readers are given: each feature of an export, on models that ship and on random ones."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

import diffquant.data
from diffquant.checkpoints.source import open_source
from diffquant.onnx.files import model_file
from diffquant.onnx.manifest import read_manifest
from diffquant.onnx.runtime.interface import load_graph
from diffquant.onnx.verification.caches import read_cache_scales
from diffquant.onnx.verifier import find_reference
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_to

POCKET = Path(diffquant.data.__file__).parent / "pocket"
COUNT = 12
_TEXTS = {
    "prose-diff-v1": "Next to getting warm and keeping warm, dinner",
    "prose-diff-v2": "We shall see how your sympathy melts before plain",
}


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
    "random Phi-4-mini-flash": Feature("phi4flash"),
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
        return export_to(self._root / "out", self._source, portable=True, **self.feature.options)

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
        text = _TEXTS.get(self.feature.source)
        if text is None:
            return [3, 14, 15, 9, 26, 5, 35, 8]
        return Tokenizer.from_file(str(self._source / "tokenizer.json")).encode(text).ids

    @cached_property
    def tokens(self) -> list[int]:
        """What torch continues the prompt with, the same codes in weights and cache.

        Readers round activations of some products to 8 bits, each by its own rule, and a code that falls to its
        neighbour moves all later ones, and with them the logits. So no token may be decided by as little.
        """
        manifest = read_manifest(self.path)
        source = open_source(self._source)
        reference = find_reference(source)(source, manifest.options, read_cache_scales(load_graph(self.path)))
        ids = list(self.prompt)
        while len(ids) < len(self.prompt) + COUNT:
            ids.append(int(reference.compute_logits([np.array([ids])])[0][0, -1].argmax()))
        likeliest = torch.tensor(ids[len(self.prompt) :])[:, None]
        leads = []
        for arithmetic in ({}, {"rounds": True}, {"noise": reference.flipping}):
            with reference.change_arithmetic(**arithmetic):
                logits = reference.compute_logits([np.array([ids])])[0][0, len(self.prompt) - 1 : -1]
            leads.append(logits.gather(1, likeliest)[:, 0] - logits.scatter(1, likeliest, -torch.inf).amax(1))
        lead, moved = leads[0].min(), max((leads[0] - other).abs().max() for other in leads[1:])
        if lead <= 3 * moved:
            raise ValueError(f"{self._root.name}: a token leads by {lead:.3f}, and rounding moves leads by {moved:.3f}")
        return ids[len(self.prompt) :]

    @cached_property
    def _source(self) -> Path:
        pocket = POCKET / self.feature.source
        return pocket if pocket.is_dir() else write_checkpoint(self._root / "source", self.feature.source)
