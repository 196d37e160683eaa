"""Results of the bench: cells (one measurement each), runs, and changes between runs."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from diffquant.errors import UsageError
from diffquant.support.files import read_text_or_xz
from diffquant.support.plain_data import parse_json

FORMAT = 1
# Smallest reported change: a machine's speed drifts by a few percent between runs, even if no repeats overlap.
SMALLEST_CHANGE = 0.05


@dataclass(frozen=True)
class BenchCell:
    """Measurements of one path (a kernel, a library or a program) on one workload.

    Attributes:
        section: part of the bench: "attention", "decode", ...
        workload: name of the workload; cells with the same workload are compared.
        path: name of the implementation.
        unit: unit of `values`: smaller is better for "ms", "s" and "MB", larger for "tokens/s" and "items/s".
        values: a measurement per repeat; empty if the path could not be measured.
        baseline: path of the same workload with which this one is compared.
        missing: reason why there are no values.
        error, tolerance: relative error against attention backend `naive` on the same shapes, and the largest allowed
            error.
        peak_bytes: peak memory in addition to what was allocated before; for whole programs, all of it.
        length: context length in tokens, for plots, or None if there is no context.
        facts: further numbers by name.
    """

    section: str
    workload: str
    path: str
    unit: str = "ms"
    values: tuple[float, ...] = ()
    baseline: str | None = None
    missing: str | None = None
    error: float | None = None
    tolerance: float | None = None
    peak_bytes: int | None = None
    length: int | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """Median of the values, or None if there are none."""
        return median(self.values) if self.values else None

    @property
    def smaller_is_better(self) -> bool:
        """Whether a smaller value is better."""
        return self.unit in ("ms", "s", "MB")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Identity of the cell within a result: section, workload, path and unit."""
        return self.section, self.workload, self.path, self.unit

    def times_better(self, other: "BenchCell | None") -> float | None:
        """Return how many times better this cell's median is than the other's, or None if either has no values."""
        if other is None or not self.median or not other.median:
            return None
        return other.median / self.median if self.smaller_is_better else self.median / other.median

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as plain data, with the median of its values and without empty entries."""
        entry = asdict(self) | {"median": self.median}
        return {name: value for name, value in entry.items() if value not in (None, {}, ())}


@dataclass(frozen=True)
class BenchResult:
    """Cells of one run of the bench, with its environment and settings.

    Attributes:
        environment: device, versions, date, commit.
        settings: options of the run.
        cells: measurements, ordered by section.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    cells: tuple[BenchCell, ...]

    def ratio(self, cell: BenchCell) -> float | None:
        """Return how many times better a cell's median is than that of its baseline, or None if either is missing."""
        key = (cell.section, cell.workload, cell.baseline, cell.unit)
        return cell.times_better(next((other for other in self.cells if other.key == key), None))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; each cell includes its ratio."""
        ratios = [(cell, self.ratio(cell)) for cell in self.cells]
        cells = [cell.to_dict() | ({} if ratio is None else {"ratio": ratio}) for cell, ratio in ratios]
        return {"format": FORMAT, "environment": self.environment, "settings": self.settings, "cells": cells}


def read_result(path: Path) -> BenchResult:
    """Read the result in a bench.json file.

    Raises:
        UsageError: the file cannot be read or is not a result of the bench.
    """
    try:
        data = parse_json(read_text_or_xz(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {path}: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("cells"), list):
        raise UsageError(f"cannot read {path}: it is not a result of `diffquant bench` in format {FORMAT}")
    try:
        cells = tuple(parse_cell(entry) for entry in data["cells"])
        return BenchResult(data["environment"], data["settings"], cells)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read {path}: a cell is damaged ({error})") from error


def parse_cell(entry: dict[str, Any]) -> BenchCell:
    """Make a cell from its plain data, as `BenchCell.to_dict` returns it and as a bench.json contains it."""
    names = set(BenchCell.__dataclass_fields__)
    known = {name: value for name, value in entry.items() if name in names}
    return BenchCell(**known | {"values": tuple(float(value) for value in known.get("values", ()))})


def find_changes(old: BenchResult, new: BenchResult) -> list[tuple[float, BenchCell, BenchCell]]:
    """Find cells whose medians differ by more than 5 %, and whose ranges of values do not overlap.

    Returns:
        For each changed cell, how many times better the new median is, the old cell, and the new cell; the largest
        slowdown comes first.
    """
    before = {cell.key: cell for cell in old.cells if cell.values}
    pairs = [(before[cell.key], cell) for cell in new.cells if cell.values and cell.key in before]
    changes = [
        (times, a, b)
        for a, b in pairs
        if max(a.values) < min(b.values) or max(b.values) < min(a.values)
        if (times := b.times_better(a)) and max(times, 1 / times) > 1 + SMALLEST_CHANGE
    ]
    return sorted(changes, key=lambda change: change[0])


def _change_text(times: float, old: BenchCell, new: BenchCell) -> str:
    factor = f"{times:.2f}x better" if times > 1 else f"{1 / times:.2f}x worse"
    medians = f"{old.median:.4g} -> {new.median:.4g} {new.unit}"
    return f"{factor}: {new.section}, {new.workload}, {new.path}: {medians}"


def summarize_changes(old: BenchResult, new: BenchResult) -> str:
    """Return a line for every cell that changed, is new or is no longer measured."""
    lines = [_change_text(*change) for change in find_changes(old, new)] or ["no change beyond noise"]
    before, after = ({cell.key for cell in result.cells if cell.values} for result in (old, new))
    gone, added = before - after, after - before
    lines += [f"no longer measured: {', '.join(key[:3])}" for key in sorted(gone)]
    lines += [f"measured for the first time: {', '.join(key[:3])}" for key in sorted(added)]
    devices = [result.environment.get("device") for result in (old, new)]
    if devices[0] != devices[1]:
        lines.insert(0, f"different devices: {devices[0]}, {devices[1]}; their times cannot be compared")
    return "\n".join(lines)
