"""The table of a sweep: text for a terminal, JSON and CSV for programs. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from diffquant.evals.columns import MISSING, Columns, Compared
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import kind_of, task_kinds
from diffquant.report.tables import aligned, csv_text, megabytes
from diffquant.support.code import CHANGED
from diffquant.support.plain_data import JsonObject, finite
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.result import SweepResult, model_names


@dataclass(frozen=True)
class Row:
    """A row of the table: one configuration of one model.

    Attributes:
        results: results by task, in the table's order, each with the 16-bit one.
        weight_bytes: size of the checkpoint that stores it, or None if every cell failed.
        kv_bytes: bytes per token in its cache, over all layers, or None if every cell failed.
    """

    model: str
    point: Point
    results: dict[str, Compared]
    weight_bytes: int | None
    kv_bytes: float | None


def rows(sweep: SweepResult) -> list[Row]:
    """The table's rows, one per configuration, each model's 16 bits first."""
    names = model_names([point.model for point in sweep.points])
    return [_row(sweep, point, names[point.model]) for point in sweep.points]


def text_table(sweep: SweepResult) -> str:
    """The table as text: aligned columns with notes below."""
    heads, lines = cells_of(sweep)
    return "\n".join([*aligned(heads, lines, names=3), "", *notes(sweep)])


def csv_table(sweep: SweepResult) -> str:
    """The table as CSV, with unrounded numbers."""
    return csv_text(json_rows(sweep))


def json_rows(sweep: SweepResult) -> list[JsonObject]:
    """The table as plain data, one flat object per row, with None for values that are missing or infinite."""
    return [finite(_record(row)) for row in rows(sweep)]


def cells_of(sweep: SweepResult) -> tuple[list[str], list[list[str]]]:
    """The heads and lines of the text table, unaligned."""
    return _columns(sweep), [_texts(row, sweep) for row in rows(sweep)]


def notes(sweep: SweepResult) -> list[str]:
    """The notes below the table."""
    results_by_columns: dict[Columns, list[TaskResult]] = {}
    for task in tasks_of(sweep):
        results_by_columns.setdefault(kind_of(task).columns, []).extend(_results(sweep, task))
    texts = [note for columns, results in results_by_columns.items() for note in columns.notes(results)]
    compared = sum(
        change.of(result) is not None
        for row in rows(sweep)
        for task, result in row.results.items()
        for change in kind_of(task).columns.changes
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
    names = model_names([point.model for point in sweep.points])
    quantized = ", ".join(
        _source_text(path, names.get(Path(path), path), sweep.settings) for path in sweep.settings["quantized"]
    )
    if quantized:
        texts.append(
            f"Weights that were quantized before this sweep: {quantized}. 16 bits there are not the model as trained."
        )
    texts += [
        f"{task} reads {', '.join(unseen)}: its cells are kept when that changes."
        for task, unseen in sweep.settings.get("unseen", {}).items()
    ]
    changed = sum(bool(c.measurement and (c.measurement.commit or "").endswith(CHANGED)) for c in sweep.cells)
    if changed:
        texts.append(f"{changed} of {len(sweep.cells)} cells were measured by code with uncommitted changes.")
    return texts


def _source_text(path: str, name: str, settings: JsonObject) -> str:
    """A checkpoint's name, with its size if that was noted."""
    nbytes = settings.get("source_bytes", {}).get(path)
    return name + (f" ({megabytes(nbytes)})" if nbytes else "")


def tasks_of(sweep: SweepResult) -> list[str]:
    """The sweep's tasks in the table's order, those scored by item first."""
    return sorted(sweep.tasks, key=lambda task: not kind_of(task).columns.by_item)


def _row(sweep: SweepResult, point: Point, name: str) -> Row:
    measurement = next((cell.measurement for cell in sweep.cells if cell.point is point and cell.measurement), None)
    return Row(
        model=name,
        point=point,
        results={task: _compared(sweep, point, task) for task in tasks_of(sweep)},
        weight_bytes=measurement.weight_bytes if measurement else None,
        kv_bytes=measurement.kv_bytes if measurement else None,
    )


def _compared(sweep: SweepResult, point: Point, task: str) -> Compared:
    full = None if point.is_baseline else sweep.baseline(point)
    return Compared(sweep.result_of(point, task), sweep.result_of(full, task) if full else None)


def _results(sweep: SweepResult, task: str) -> list[TaskResult]:
    return [cell.result for cell in sweep.cells if cell.task == task and cell.result]


def _columns(sweep: SweepResult) -> list[str]:
    tasks = tasks_of(sweep)
    alone = sum(kind_of(task).columns.by_item for task in tasks) == 1
    heads = [kind_of(task).columns.heads(task, _results(sweep, task), alone) for task in tasks]
    return ["model", "target", "scheme", *(head for of_task in heads for head in of_task), "stored"]


def _texts(row: Row, sweep: SweepResult) -> list[str]:
    texts = [
        column.text(compared)
        for task, compared in row.results.items()
        for column in kind_of(task).columns.shown(_results(sweep, task))
    ]
    return [row.model, row.point.target or MISSING, row.point.scheme, *texts, _stored(row)]


def _stored(row: Row) -> str:
    weights = f"{row.weight_bytes / 1e6:.1f} MB" if row.weight_bytes is not None else MISSING
    cache = f"{row.kv_bytes / 1e3:.2f} kB/token" if row.kv_bytes is not None else MISSING
    if row.point.target in ("", EXPORTED, RECIPE):
        return f"{weights}, {cache}"
    return weights if row.point.target == "weights" else cache if row.point.target in ("kv", "k", "v") else MISSING


def _record(row: Row) -> JsonObject:
    point = row.point
    record: JsonObject = {
        "model": row.model,
        "target": point.target,
        "bits": point.bits,
        "granularity": point.granularity,
    }
    for task, compared in row.results.items():
        columns = kind_of(task).columns
        before = f"{task} " if columns.has_own_names else ""
        record |= {f"{before}{name}": value for name, value in columns.record(compared).items()}
    measured = {kind_of(task) for task in row.results}
    for kind in task_kinds():
        if kind not in measured and not kind.columns.has_own_names:
            record |= kind.columns.record(Compared(None, None))
    return record | {"weight_bytes": row.weight_bytes, "kv_bytes_per_token": row.kv_bytes}
