"""The result of a sweep, and its table: text for a terminal, JSON and CSV for programs. No torch here."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO
from pathlib import Path

from diffquant.errors import FailedCellsError
from diffquant.measure.cells import EXPORTED, RECIPE, Cell, SweepPoint
from diffquant.measure.results import MISSING, Columns, TaskResult
from diffquant.measure.task import Task
from diffquant.measure.tasks import task_class_named, task_kinds
from diffquant.recipe import Recipe
from diffquant.reports.plots import Picture
from diffquant.reports.tables import Table, format_csv, format_size
from diffquant.support.files import read_text_or_xz
from diffquant.support.installation import CHANGED
from diffquant.support.plain_data import JsonObject, parse_json, replace_nonfinite


@dataclass(frozen=True, repr=False)
class SweepResult:
    """All cells in the grid's order, with the options, dtype, versions, commit and date of the sweep.

    It can be printed and drawn, and a notebook shows its table.
    """

    cells: list[Cell]
    settings: JsonObject

    def __repr__(self) -> str:
        failed = f", {len(self.failed_cells)} failed" if self.failed_cells else ""
        return f"SweepResult({len(self.cells)} cells, {len(self.points)} configurations{failed})"

    def __str__(self) -> str:
        return self.table() if self.cells else repr(self)

    def table(self) -> str:
        """Return the table with its notes, as the command prints it."""
        return "\n".join([*results_table(self).text_lines(), "", *notes(self)])

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw changes and scores against bits, for a notebook.

        Args:
            path: file to draw into as well, whose suffix (.png, .svg, .pdf) determines the format.

        Raises:
            UsageError: there is nothing to draw.
        """
        from diffquant.measure.sweep.plot import plot

        drawn = BytesIO()
        plot(self, drawn)
        if path is not None:
            plot(self, Path(path))
        return Picture(drawn.getvalue())

    def _repr_html_(self) -> str:
        return results_table(self).html() + "".join(f"<p>{escape(note)}</p>" for note in notes(self))

    @cached_property
    def points(self) -> list[SweepPoint]:
        """Every configuration once, in the grid's order."""
        return list({id(cell.point): cell.point for cell in self.cells}.values())

    @cached_property
    def names(self) -> dict[Path, str]:
        """A unique name for each model, by its path."""
        return model_names([point.model for point in self.points])

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks in the table's order, those scored by item first."""
        tasks = dict.fromkeys(cell.task for cell in self.cells)
        return sorted(tasks, key=lambda task: not task_class_named(task).columns.by_item)

    @property
    def failed_cells(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.result is None]

    def caption(self, cell: Cell) -> str:
        return f"{self.names[cell.point.model]}, {cell.point.label}, {cell.task}"

    def cells_of(self, kind: type[Task]) -> list[tuple[str, Cell]]:
        """Return the measured cells of one kind of task, each with its model's name."""
        return [(self.names[c.point.model], c) for c in self.cells if c.result and task_class_named(c.task) is kind]

    def results_of(self, task: str) -> list[TaskResult]:
        return [cell.result for cell in self.cells if cell.task == task and cell.result]

    def result_and_baseline(self, point: SweepPoint, task: str) -> tuple[TaskResult | None, TaskResult | None]:
        """Return a configuration's result and the 16-bit result that it is compared with; a missing one is None."""
        full = None if point.is_baseline else self._baselines.get(point.compared_with)
        found = self._result_by_point_and_task
        return found.get((id(point), task)), found.get((id(full), task)) if full else None

    def find_any_result(self, point: SweepPoint) -> TaskResult | None:
        """Return a configuration's result of any task, for its stored sizes, or None if all of its cells failed."""
        found = (self._result_by_point_and_task.get((id(point), task)) for task in self.tasks)
        return next(filter(None, found), None)

    @cached_property
    def _result_by_point_and_task(self) -> dict[tuple[int, str], TaskResult | None]:
        # The first cell of a point and task counts.
        return {(id(cell.point), cell.task): cell.result for cell in reversed(self.cells)}

    @cached_property
    def _baselines(self) -> dict[Path | None, SweepPoint]:
        return {point.model: point for point in reversed(self.points) if point.is_baseline}

    def require_complete(self) -> None:
        """Check that every cell has a result.

        Raises:
            FailedCellsError: cells failed; the message lists their errors, and the exception's `result` is this object.
        """
        if self.failed_cells:
            lines = [f"{self.caption(cell)}: {cell.error}" for cell in self.failed_cells]
            raise FailedCellsError(
                f"{len(self.failed_cells)} of {len(self.cells)} cells failed; run the same command again to retry only "
                "these:\n" + "\n".join(lines),
                self,
            )

    def to_json(self) -> str:
        """Write settings and every cell as JSON, with full results."""
        cells = [
            {
                "model": str(cell.point.model),
                **{name: getattr(cell.point, name) for name in ("target", "bits", "granularity")},
                "compared_with": str(cell.point.compared_with) if cell.point.compared_with else None,
                "task": cell.task,
                "code": cell.key.get("code"),
                "result": cell.result.to_cell() if cell.result else None,
                "error": cell.error,
            }
            for cell in self.cells
        ]
        return json.dumps({"settings": self.settings, "cells": cells}, indent=1) + "\n"


def read_sweep(file: Path) -> SweepResult:
    """Read a sweep.json, or sweep.json.xz if only that exists.

    Recipes are not stored, so those of its points are empty.

    Raises:
        OSError: there is no such file.
        ValueError, LookupError, TypeError: the file is not a sweep's.
    """
    data = parse_json(read_text_or_xz(file))
    points: dict[tuple[object, ...], SweepPoint] = {}
    cells = []
    for cell in data["cells"]:
        key = tuple(cell[name] for name in ("model", "target", "bits", "granularity"))
        if key not in points:
            rival = cell.get("compared_with") if cell["target"] == EXPORTED else cell["model"]
            model, target, bits, granularity = key
            points[key] = SweepPoint(Path(model), target, bits, granularity, Recipe(), Path(rival) if rival else None)
        result = TaskResult.from_dict(cell["result"]) if cell["result"] else None
        cells.append(Cell(points[key], cell["task"], result, cell["error"], {"code": cell.get("code")}))
    return SweepResult(cells, data["settings"])


def model_names(models: list[Path]) -> dict[Path, str]:
    """Make a unique name for each checkpoint: its file's or folder's name, with as many parents as needed.

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
    is_unique = len({*names.values()}) == len(distinct)
    return {model: names[model] if is_unique else str(model) for model in distinct}


def csv_table(sweep: SweepResult) -> str:
    """Write the table as CSV, with unrounded numbers."""
    return format_csv(json_rows(sweep))


def json_rows(sweep: SweepResult) -> list[JsonObject]:
    """Return the table's rows as flat objects with unrounded numbers; missing or infinite numbers are None."""
    return [replace_nonfinite(_record(sweep, point)) for point in sweep.points]


def results_table(sweep: SweepResult) -> Table:
    """Make the table with rounded numbers and the 16-bit rows shaded."""
    alone = sum(task_class_named(task).columns.by_item for task in sweep.tasks) == 1
    found = [(task, task_class_named(task).columns, sweep.results_of(task)) for task in sweep.tasks]
    heads = [head for task, columns, results in found for head in columns.headings(task, results, alone)]
    shown = [(task, column) for task, columns, results in found for column in columns.table_metrics(results)]
    lines = [
        [
            sweep.names[point.model],
            point.target or MISSING,
            point.scheme_text,
            *(column.text(*sweep.result_and_baseline(point, task)) for task, column in shown),
            _stored_text(point, sweep.find_any_result(point)),
        ]
        for point in sweep.points
    ]
    baselines = [point.is_baseline for point in sweep.points]
    return Table(["model", "target", "scheme", *heads, "stored"], lines, baselines, names=3)


def notes(sweep: SweepResult) -> list[str]:
    """Return the notes below the table."""
    results_by_columns: dict[Columns, list[TaskResult]] = {}
    for task in sweep.tasks:
        results_by_columns.setdefault(task_class_named(task).columns, []).extend(sweep.results_of(task))
    texts = [note for columns, results in results_by_columns.items() for note in columns.notes(results)]
    compared = sum(
        change.estimate(*sweep.result_and_baseline(point, task)) is not None
        for point in sweep.points
        for task in sweep.tasks
        for change in task_class_named(task).columns.change_metrics
        if not change.is_log
    )
    if compared > 1:
        texts.append(
            f"{compared} differences from 16 bits are compared; by chance, one 95 % interval in twenty misses the "
            "truth."
        )
    texts.append(
        "stored is the size of the checkpoint (two bytes per weight at 16 bits) or of the KV cache per token, scales "
        "included; quantized logits and operands store nothing."
    )
    if any(point.target == "weights" for point in sweep.points):
        texts.append("Weights are rounded to nearest; `quantize --effort balanced` usually loses less.")
    sizes = sweep.settings.get("source_bytes", {})
    quantized = ", ".join(
        sweep.names.get(Path(path), path) + (f" ({format_size(sizes[path])})" if sizes.get(path) else "")
        for path in sweep.settings["quantized"]
    )
    if quantized:
        texts.append(
            f"Models whose weights were already quantized before this sweep: {quantized}. Their 16-bit results are not "
            "those of the model as trained."
        )
    texts += [
        f"{task} reads {', '.join(unseen)}, which diffquant does not track: "
        "stored results are used again even if it has changed."
        for task, unseen in sweep.settings.get("unseen", {}).items()
    ]
    if changed := sum(bool(c.result and (c.result.commit or "").endswith(CHANGED)) for c in sweep.cells):
        texts.append(f"{changed} of {len(sweep.cells)} cells were measured by code with uncommitted changes.")
    return texts


def _stored_text(point: SweepPoint, result: TaskResult | None) -> str:
    weights = MISSING if result is None else f"{(result.weight_bytes or 0) / 1e6:.1f} MB"
    cache = MISSING if result is None else f"{(result.kv_bytes or 0) / 1e3:.2f} kB/token"
    if point.target in ("", EXPORTED, RECIPE):
        return f"{weights}, {cache}"
    return weights if point.target == "weights" else cache if point.target in ("kv", "k", "v") else MISSING


def _record(sweep: SweepResult, point: SweepPoint) -> JsonObject:
    record: JsonObject = {"model": sweep.names[point.model]}
    record |= {name: getattr(point, name) for name in ("target", "bits", "granularity")}
    for task in sweep.tasks:
        columns = task_class_named(task).columns
        before = f"{task} " if columns.has_own_names else ""
        record |= {
            f"{before}{name}": value for name, value in columns.record(*sweep.result_and_baseline(point, task)).items()
        }
    measured = {task_class_named(task) for task in sweep.tasks}
    for kind in task_kinds():
        if kind not in measured and not kind.columns.has_own_names:
            record |= kind.columns.record(None, None)
    sizes = sweep.find_any_result(point)
    return record | {
        "weight_bytes": sizes.weight_bytes if sizes else None,
        "kv_bytes_per_token": sizes.kv_bytes if sizes else None,
    }
