"""The result of a sweep, as the tables, the plot and the report read it. No torch here."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffquant.errors import FailedCellsError
from diffquant.evals.task_result import TaskResult
from diffquant.recipe import Recipe
from diffquant.support.plain_data import JsonObject, parse_json
from diffquant.support.xz import read_text
from diffquant.sweep.grid import EXPORTED, Point
from diffquant.sweep.measurement import Measurement


@dataclass(frozen=True)
class MeasuredCell:
    """A cell of a result: its measurement, or the error if it failed.

    Attributes:
        code: digest of the code that computed it; None in results older than this field.
    """

    point: Point
    task: str
    measurement: Measurement | None
    error: str | None
    code: str | None = None

    @property
    def result(self) -> TaskResult | None:
        """The task's result, or None if the cell failed."""
        return self.measurement.result if self.measurement else None

    @property
    def logit_report(self) -> list[dict[str, float]]:
        """Numbers about each layer's logit quantizer; empty if logits were not quantized."""
        return (self.measurement.logit_report if self.measurement else None) or []


@dataclass(frozen=True, repr=False)
class SweepResult:
    """All cells in the grid's order, with the options, dtype, versions, commit and date of the sweep."""

    cells: list[MeasuredCell]
    settings: JsonObject

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"SweepResult({len(self.cells)} cells, {len(self.points)} configurations{failed})"

    @cached_property
    def points(self) -> list[Point]:
        """Every configuration once, in the grid's order."""
        return list({id(cell.point): cell.point for cell in self.cells}.values())

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def failed(self) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.measurement is None]

    def result_of(self, point: Point, task: str) -> TaskResult | None:
        return self._results.get((id(point), task))

    def baseline(self, point: Point) -> Point | None:
        """The 16-bit point that a configuration is compared with, or None if the sweep has none."""
        return self._baselines.get(point.compared_with)

    @cached_property
    def _results(self) -> dict[tuple[int, str], TaskResult | None]:
        # The first cell of a point and task counts.
        return {(id(cell.point), cell.task): cell.result for cell in reversed(self.cells)}

    @cached_property
    def _baselines(self) -> dict[Path | None, Point]:
        return {point.model: point for point in reversed(self.points) if point.is_baseline}

    def require_complete(self) -> None:
        """Check that every cell has a result.

        Raises:
            FailedCellsError: cells failed; names each with its error, and holds this object as `result`.
        """
        if self.failed:
            names = model_names([point.model for point in self.points])
            lines = [f"{names[c.point.model]}, {c.point.label}, {c.task}: {c.error}" for c in self.failed]
            raise FailedCellsError(
                f"{len(self.failed)} of {len(self.cells)} cells failed; run the same command again to retry them "
                "alone:\n" + "\n".join(lines),
                self,
            )

    def to_json(self) -> str:
        """Settings and every cell as JSON, results in full."""
        cells = [
            {
                "model": str(cell.point.model),
                "target": cell.point.target,
                "bits": cell.point.bits,
                "granularity": cell.point.granularity,
                "compared_with": str(cell.point.compared_with) if cell.point.compared_with else None,
                "task": cell.task,
                "code": cell.code,
                "result": cell.measurement.to_dict() if cell.measurement else None,
                "error": cell.error,
            }
            for cell in self.cells
        ]
        return json.dumps({"settings": self.settings, "cells": cells}, indent=1) + "\n"


def read_sweep(file: Path, compared: dict[str, str] | None = None) -> SweepResult:
    """Read a sweep.json. Its points have empty recipes, since tables and plots show only their names.

    Args:
        compared: checkpoint that each exported folder is compared with, for files too old to say so themselves.
    """
    data = parse_json(read_text(file))
    points: dict[tuple[object, ...], Point] = {}
    cells = []
    for cell in data["cells"]:
        key = tuple(cell[name] for name in ("model", "target", "bits", "granularity"))
        if key not in points:
            rival = cell.get("compared_with") or (compared or {}).get(cell["model"])
            rival = rival if cell["target"] == EXPORTED else cell["model"]
            model, target, bits, granularity = key
            points[key] = Point(Path(model), target, bits, granularity, Recipe(), Path(rival) if rival else None)
        measurement = Measurement.from_dict(cell["result"]) if cell["result"] else None
        cells.append(MeasuredCell(points[key], cell["task"], measurement, cell["error"], cell.get("code")))
    return SweepResult(cells, data["settings"])


def model_names(models: list[Path]) -> dict[Path, str]:
    """A unique name for each checkpoint: its file's or folder's name, with as many parents as that takes.

    The suffix of a GGUF file is left out unless only it distinguishes the file from a folder.
    """
    distinct = list(dict.fromkeys(models))
    full = {model: model.absolute().parts[1:] or (str(model),) for model in distinct}
    short = {model: (*parts[:-1], parts[-1].removesuffix(".gguf")) for model, parts in full.items()}
    names: dict[Path, str] = {}
    for parts in (short, full):
        for depth in range(1, max(map(len, parts.values()), default=0) + 1):
            endings = {model: "/".join(parts[model][-depth:]) for model in distinct}
            taken = Counter(endings.values())
            names |= {model: name for model, name in endings.items() if model not in names and taken[name] == 1}
    is_told = len({*names.values()}) == len(distinct)
    return {model: names[model] if is_told else str(model) for model in distinct}
