"""Texts that studies score, what they keep of a score, and the file that keeps the results of KV caches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffquant.benchmarks.measuring import describe_environment
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.texts import load_text, text_digest
from diffquant.errors import UsageError
from diffquant.measure.language_model import ModelOutputs
from diffquant.measure.protocols import hellaswag
from diffquant.measure.stats import Difference, mean_interval
from diffquant.measure.tasks.perplexity import compute_perplexity, compute_reference
from diffquant.measure.torch_model import TorchModel
from diffquant.support.files import find_file_or_xz, write_json
from research.studies.results import read_json

TEXTS = ("prose", "elsewhere")
# Of a text's score.
KEPT = ("perplexity", "kl", "tokens_by_window", "nll_by_window", "kl_by_window")


def texts_of(characters: int) -> dict[str, str]:
    """The windows read of each text, by the names in `TEXTS`."""
    text = load_text()
    return {
        "prose": text[len(text) // 2 :][:characters],
        "elsewhere": "\n".join(item.query for item in hellaswag.load_items())[:characters],
    }


def settings_of(source: Source, texts: Mapping[str, str], characters: int, **windows: int) -> dict[str, Any]:
    """All that a study's results depend on but the cache: the model, the texts, and how windows are read."""
    return {
        "model": source.checkpoint.name,
        "fingerprint": source.fingerprint,
        "characters": characters,
        **windows,
        **{name: text_digest(text) for name, text in texts.items()},
    }


def references_of(model: TorchModel, texts: Mapping[str, str], window: int) -> dict[str, ModelOutputs]:
    """States of a model over windows of each text, which others are compared with."""
    return {name: compute_reference(model, text, window, window) for name, text in texts.items()}


def scores_of(
    model: TorchModel, texts: Mapping[str, str], window: int, references: Mapping[str, ModelOutputs]
) -> dict[str, dict[str, Any]]:
    """What a study keeps of each text's score over the same windows."""
    scores = {
        name: compute_perplexity(model, text, window, window, reference=references[name])
        for name, text in texts.items()
    }
    return {name: {kept: score[kept] for kept in KEPT} for name, score in scores.items()}


def kl_change(ours: Mapping[str, Any], others: Mapping[str, Any]) -> Difference:
    """The change of KL from another score of a text to ours, over the same windows."""
    changes = [a - b for a, b in zip(ours["kl_by_window"], others["kl_by_window"], strict=True)]
    return mean_interval(changes, ours["tokens_by_window"])


@dataclass
class KVResults:
    """Results of one model's caches by name, written to a file one after the other.

    Attributes:
        file: where they are and go.
        settings: what they depend on.
        rows: the results, those first that the file held already.

    Raises:
        UsageError: the file holds results of another model, text or window.
    """

    file: Path
    settings: Mapping[str, Any]
    rows: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not find_file_or_xz(self.file).exists():
            return
        former: dict[str, Any] = read_json(self.file)
        if former["settings"] != self.settings:
            raise UsageError(f"{self.file} holds results of another model, text or window; name another with --json")
        self.rows = former["results"]

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Take a cache's result, with the day and the commit that it is of, and write the file."""
        here = describe_environment()
        self.rows[name] = {**row, "date": here["date"], "commit": here["commit"]}
        write_json(self.file, {"environment": here, **self.to_dict()})

    def to_dict(self) -> dict[str, Any]:
        """Settings and results as the file has them, without the surroundings that measured them."""
        return {"settings": self.settings, "results": self.rows}
