"""The sweep as rows: text for a terminal, JSON and CSV for programs. No torch here."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.evals.stats import Difference, Estimate, Flips, estimate, flips, paired_difference, recovery
from diffquant.report.tables import aligned
from diffquant.sweep.grid import EXPORTED, RECIPE, Point
from diffquant.sweep.result import SweepResult, model_names

_MISSING = "-"
_FAILED = "failed"


@dataclass(frozen=True)
class Accuracy:
    """A task scored item by item, and how it compares with 16 bits on the same items.

    Attributes:
        difference, flips, recovery: None at 16 bits, and where the 16-bit cell is missing; flips also
            where the task keeps no choices.
    """

    task: str
    metric: str
    score: Estimate
    difference: Difference | None
    flips: Flips | None
    recovery: float | None


@dataclass(frozen=True)
class Row:
    """One configuration of one model.

    Attributes:
        accuracies: in the order of the sweep's tasks; None where a cell failed.
        perplexity, bits_per_byte, kl: None where not measured.
        weight_bytes: of the checkpoint that stores it; kv_bytes: a token, over all layers.
    """

    model: str
    point: Point
    accuracies: tuple[Accuracy | None, ...]
    perplexity: float | None
    bits_per_byte: float | None
    kl: float | None
    weight_bytes: int | None
    kv_bytes: float | None


def rows(sweep: SweepResult) -> list[Row]:
    """One row a configuration, a model's 16 bits first."""
    names = model_names([point.model for point in sweep.points])
    return [_row(sweep, point, names[point.model]) for point in sweep.points]


def text_table(sweep: SweepResult) -> str:
    """Aligned columns, and below them what the numbers are."""
    heads, lines = _columns(sweep), [_texts(row, sweep) for row in rows(sweep)]
    return "\n".join([*aligned(heads, lines, names=3), "", *notes(sweep)])


def csv_table(sweep: SweepResult) -> str:
    """Numbers in full, one line a row."""
    records = json_rows(sweep)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def json_rows(sweep: SweepResult) -> list[dict[str, Any]]:
    """Plain data, one flat object a row; what was not measured is None."""
    return [_record(row, sweep) for row in rows(sweep)]


def cells_of(sweep: SweepResult) -> tuple[list[str], list[list[str]]]:
    """The text table's heads and lines, unaligned."""
    return _columns(sweep), [_texts(row, sweep) for row in rows(sweep)]


def notes(sweep: SweepResult) -> list[str]:
    """What a reader must know to read the table."""
    said = []
    counts = {a.score.n for row in rows(sweep) for a in row.accuracies if a}
    if counts:
        items = ", ".join(str(n) for n in sorted(counts))
        shots = sorted({cell.result["shots"] for cell in sweep.cells if cell.result and "shots" in cell.result})
        shown = f"many-shot after {', '.join(map(str, shots))} demonstrations" if shots else "zero-shot"
        said.append(
            f"{items} items, {shown}; ± is one standard error. The difference from 16 bits is paired over the same "
            "items, with its 95 % interval; flips are items that became right (+) and wrong (-)."
        )
    if "perplexity" in sweep.tasks:
        said.append("KL is the mean of KL(16 bits || quantized) over next-token distributions, in nats.")
    said.append("stored is the checkpoint (weights) or the cache a token (kv), scales included; logits store nothing.")
    quantized = ", ".join(Path(path).name for path in sweep.settings["quantized"])
    if quantized:
        said.append(
            f"The weights of {quantized} were quantized before: its 16 bits are not the model as it was trained."
        )
    return said


def _row(sweep: SweepResult, point: Point, name: str) -> Row:
    text = sweep.result_of(point, "perplexity") or {}
    stored: dict[str, Any] = next((c.result["stored"] for c in sweep.cells if c.point is point and c.result), {})
    return Row(
        model=name,
        point=point,
        accuracies=tuple(_accuracy(sweep, point, task) for task in _accuracy_tasks(sweep)),
        perplexity=text.get("perplexity"),
        bits_per_byte=text.get("bits_per_byte"),
        kl=text.get("kl"),
        weight_bytes=stored.get("weights"),
        kv_bytes=stored.get("kv_per_token"),
    )


def _accuracy(sweep: SweepResult, point: Point, task: str) -> Accuracy | None:
    result = sweep.result_of(point, task)
    if result is None:
        return None
    full = None if point.is_baseline else sweep.baseline(point)
    baseline = sweep.result_of(full, task) if full else None
    if baseline is None:
        return Accuracy(task, result["metric"], _score(result), None, None, None)
    paired = result["values"] is not None and baseline["values"] is not None
    return Accuracy(
        task,
        result["metric"],
        _score(result),
        paired_difference(result["values"], baseline["values"]) if paired else None,
        _flips(result, baseline),
        recovery(_score(result).mean, _score(baseline).mean),
    )


def _score(result: dict[str, Any]) -> Estimate:
    """A task that is not scored item by item (a perplexity over documents) has no standard error here."""
    return estimate(result["values"]) if result["values"] else Estimate(result["score"], None, result["n"])


def _flips(result: dict[str, Any], baseline: dict[str, Any]) -> Flips | None:
    if "choices" not in result:
        return None
    return flips(result["values"], baseline["values"], result["choices"], baseline["choices"])


def _accuracy_tasks(sweep: SweepResult) -> list[str]:
    return [task for task in sweep.tasks if task != "perplexity"]


def _columns(sweep: SweepResult) -> list[str]:
    tasks = _accuracy_tasks(sweep)
    heads = ["model", "target", "scheme"]
    for task in tasks:
        metric = next((a.metric for row in rows(sweep) for a in row.accuracies if a and a.task == task), "score")
        prefix = f"{task} " if len(tasks) > 1 or task != "hellaswag" else ""
        heads += [f"{prefix}{metric}", "difference [95 %]", "flips", "recovery"]
    if "perplexity" in sweep.tasks:
        heads += ["ppl", "KL"]
    return [*heads, "stored"]


def _texts(row: Row, sweep: SweepResult) -> list[str]:
    point = row.point
    texts = [row.model, point.target or _MISSING, point.scheme]
    for accuracy in row.accuracies:
        texts += _accuracy_texts(accuracy)
    if "perplexity" in sweep.tasks:
        texts += [_FAILED if row.perplexity is None else f"{row.perplexity:.4g}", _number(row.kl, ".2g")]
    return [*texts, _stored(row)]


def _accuracy_texts(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return [_FAILED, _MISSING, _MISSING, _MISSING]
    score, change, turned = accuracy.score, accuracy.difference, accuracy.flips
    return [
        f"{score.mean:.4g}" if score.se is None else f"{score.mean:.1%} ± {score.se:.1%}",
        f"{100 * change.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]" if change else _MISSING,
        f"+{turned.gained} -{turned.lost}" if turned else _MISSING,
        _number(accuracy.recovery, ".1%"),
    ]


def _stored(row: Row) -> str:
    weights = f"{row.weight_bytes / 1e6:.1f} MB" if row.weight_bytes is not None else _MISSING
    cache = f"{row.kv_bytes / 1e3:.2f} kB/token" if row.kv_bytes is not None else _MISSING
    if row.point.target in ("", EXPORTED, RECIPE):
        return f"{weights}, {cache}"
    return {"weights": weights, "logits": _MISSING}.get(row.point.target, cache)


def _record(row: Row, sweep: SweepResult) -> dict[str, Any]:
    point = row.point
    record: dict[str, Any] = {
        "model": row.model,
        "target": point.target,
        "bits": point.bits,
        "granularity": point.granularity,
    }
    for task, accuracy in zip(_accuracy_tasks(sweep), row.accuracies, strict=True):
        record |= {f"{task} {name}": value for name, value in _accuracy_record(accuracy).items()}
    return record | {
        "perplexity": row.perplexity,
        "bits_per_byte": row.bits_per_byte,
        "kl": row.kl,
        "weight_bytes": row.weight_bytes,
        "kv_bytes_per_token": row.kv_bytes,
    }


def _accuracy_record(accuracy: Accuracy | None) -> dict[str, Any]:
    score = accuracy.score if accuracy else None
    change = accuracy.difference if accuracy else None
    turned = accuracy.flips if accuracy else None
    return {
        "metric": accuracy.metric if accuracy else None,
        "score": score.mean if score else None,
        "se": score.se if score else None,
        "n": score.n if score else None,
        "difference": change.mean if change else None,
        "difference_low": change.low if change else None,
        "difference_high": change.high if change else None,
        "gained": turned.gained if turned else None,
        "lost": turned.lost if turned else None,
        "choices_changed": turned.choices if turned else None,
        "recovery": accuracy.recovery if accuracy else None,
    }


def _number(value: float | None, spec: str) -> str:
    return _MISSING if value is None else format(value, spec)
