"""Committed results read back as the objects that wrote them, to be drawn or compared again."""

import json
from pathlib import Path
from typing import Any

from diffquant.calib.analysis.attention_map import AttentionMaps, ModelAttention, Place
from diffquant.calib.analysis.outliers import Magnitude, ModelOutliers, Outliers
from diffquant.calib.search.result import Candidate, Measurement, SearchResult
from diffquant.recipe import Recipe
from diffquant.sweep.grid import EXPORTED, Point
from diffquant.sweep.measurement import Measurement as CellMeasurement
from diffquant.sweep.result import MeasuredCell, SweepResult


def read_json(file: Path) -> Any:
    """A result as plain data."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_sweep(file: Path, compared: dict[str, str] | None = None) -> SweepResult:
    """The sweep in a sweep.json. Its points' recipes are empty: neither tables nor plots show more than their names.

    Args:
        compared: the checkpoint that each exported folder is compared with, where sweep.json is of before it said so.
    """
    data, points, cells = read_json(file), {}, []
    for cell in data["cells"]:
        key = tuple(cell[name] for name in ("model", "target", "bits", "granularity"))
        if key not in points:
            rival = cell.get("compared_with") or (compared or {}).get(cell["model"])
            rival = rival if cell["target"] == EXPORTED else cell["model"]
            model, target, bits, granularity = key
            points[key] = Point(Path(model), target, bits, granularity, Recipe(), Path(rival) if rival else None)
        measurement = CellMeasurement.from_dict(cell["result"]) if cell["result"] else None
        cells.append(MeasuredCell(points[key], cell["task"], measurement, cell["error"], cell.get("code")))
    return SweepResult(cells, data["settings"])


def read_outliers(file: Path) -> Outliers:
    """The outliers in an outliers.json."""
    data = read_json(file)
    models = [
        ModelOutliers(
            **model
            | {"layers": [_magnitudes(layer) for layer in model["layers"]], "overall": _magnitudes(model["overall"])}
        )
        for model in data["models"]
    ]
    return Outliers(models, data["settings"])


def read_attention_maps(file: Path) -> AttentionMaps:
    """The attention maps in an attention-map.json."""
    data = read_json(file)
    models = [
        ModelAttention(**model | {"places": [Place(**place) for place in model["places"]]}) for model in data["models"]
    ]
    return AttentionMaps(models, data["settings"])


def read_search(file: Path) -> SearchResult:
    """The result in a search-*.json."""
    data = read_json(file)
    measurements = [
        Measurement(**unit | {name: {int(bits): cost for bits, cost in unit[name].items()} for name in _BY_WIDTH})
        for unit in data["measurements"]
    ]
    candidates = [Candidate(**candidate) for candidate in data["candidates"]]
    recipe = Recipe.from_dict(data["recipe"])
    return SearchResult(**data | {"candidates": candidates, "measurements": measurements, "recipe": recipe})


_BY_WIDTH = ("kl", "attention")


def _magnitudes(by_kind: dict[str, Any]) -> dict[str, Magnitude]:
    return {
        kind: Magnitude(each["count"], {int(rank): value for rank, value in each["top"].items()}, each["median"])
        for kind, each in by_kind.items()
    }
