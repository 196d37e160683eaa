"""Outliers of models as plain data. No torch here."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffquant.support.plain_data import parse_json
from diffquant.support.xz import read_text

RANKS = (1, 2, 3, 10, 100)
LOGITS, HIDDEN = "logits", "hidden"


@dataclass(frozen=True)
class Magnitude:
    """Magnitudes of one kind of activation.

    Attributes:
        count: number of magnitudes.
        top: largest ones by rank, exact; ranks beyond the count are left out.
        median: median, its relative error at most `calib.statistics.QUANTILE_ERROR`.
    """

    count: int
    top: dict[int, float]
    median: float


@dataclass(frozen=True)
class ModelOutliers:
    """Magnitudes of one model's activations by kind, "logits" and "hidden".

    Attributes:
        name: name of the checkpoint's folder or file.
        generation: "DIFF V1", "DIFF V2" or "Transformer".
        fingerprint: fingerprint of the checkpoint.
        tokens: number of tokens that it read.
        layers: magnitudes of each layer, without logits where a layer has no attention.
        overall: magnitudes of all layers together.
    """

    name: str
    generation: str
    fingerprint: str
    tokens: int
    layers: list[dict[str, Magnitude]]
    overall: dict[str, Magnitude]


@dataclass(frozen=True)
class Outliers:
    """Outliers of several models over one text.

    Attributes:
        models: results of the models, in the order asked for.
        settings: text, window, dtype and versions of the run.
    """

    models: list[ModelOutliers]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """The results as a JSON document."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_outliers(file: Path) -> Outliers:
    """The outliers in an outliers.json."""
    data = parse_json(read_text(file))
    models = [
        ModelOutliers(
            **model
            | {"layers": [_magnitudes(layer) for layer in model["layers"]], "overall": _magnitudes(model["overall"])}
        )
        for model in data["models"]
    ]
    return Outliers(models, data["settings"])


def _magnitudes(by_kind: dict[str, Any]) -> dict[str, Magnitude]:
    return {
        kind: Magnitude(each["count"], {int(rank): value for rank, value in each["top"].items()}, each["median"])
        for kind, each in by_kind.items()
    }
