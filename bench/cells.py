"""Results of the bench: a cell is one path measured on one workload, a result all cells of a run."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diffquant.bench.timing import Spread, spread
from diffquant.errors import UsageError
from diffquant.support.plain_data import parse_json
from diffquant.support.xz import read_text

FORMAT = 1


@dataclass(frozen=True)
class BenchCell:
    """A path's measurement on a workload: a kernel, a library or a program at one shape.

    Attributes:
        section: part of the bench: "attention", "decode", ...
        workload: name of what was run; cells of one workload are compared with each other.
        path: name of who ran it.
        unit: unit of `values`: "ms" and "s" fall as things get better, "tokens/s" and "items/s" rise.
        values: measurements, one a repeat; none where the path is missing.
        baseline: path of the same workload that the ratio is to.
        missing: reason why there are no values.
        error, tolerance: relative error against `naive` on the same shapes, and the largest allowed.
        operations, bytes: operations and bytes moved of one call, counted.
        touched: bytes that all its timed calls read and write between them, however often.
        peak_bytes: memory at most, beyond what was held before (for whole programs: all of it).
        length: tokens of context, for plots; None if it does not apply.
        facts: further numbers of this cell by name.
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
    operations: int | None = None
    bytes: int | None = None
    touched: int | None = None
    peak_bytes: int | None = None
    length: int | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> Spread | None:
        """Median and extremes of the values, or None if the path is missing."""
        return spread(list(self.values)) if self.values else None

    @property
    def falls(self) -> bool:
        """Whether a smaller value is better."""
        return self.unit in ("ms", "s", "MB")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Name of the cell within a result."""
        return self.section, self.workload, self.path, self.unit

    def to_dict(self) -> dict[str, Any]:
        """What the cell has, and the median of its values, as plain data."""
        entry = {name: value for name, value in asdict(self).items() if value not in (None, {}, ())}
        return entry | ({"median": self.spread.median} if self.spread else {})


@dataclass(frozen=True)
class BenchResult:
    """Cells of one run of the bench, and what they were measured on.

    Attributes:
        environment: device, versions, date, commit.
        machine: measured speeds: "copy" in bytes a second, "matmul" in operations a second by dtype; and
            "cache", the bytes of the largest cache, where the system tells.
        settings: options of the run.
        cells: measurements, section by section.
    """

    environment: dict[str, Any]
    machine: dict[str, dict[str, float]]
    settings: dict[str, Any]
    cells: tuple[BenchCell, ...]

    def ratio(self, cell: BenchCell) -> float | None:
        """How many times better a cell is than its baseline, by medians, or None if one of them is missing."""
        baseline = next(
            (c for c in self.cells if c.key == (cell.section, cell.workload, cell.baseline, cell.unit)), None
        )
        if baseline is None or baseline.spread is None or cell.spread is None:
            return None
        better, worse = (cell, baseline) if cell.falls else (baseline, cell)
        top, bottom = worse.spread, better.spread
        return top.median / bottom.median if top and bottom and bottom.median else None

    def of_roofline(self, cell: BenchCell) -> float | None:
        """Share of the speed that the machine's measured copy and matmul allow, or None if work was not counted."""
        limits = self._limits(cell)
        return None if limits is None or cell.spread is None else max(limits) * 1e3 / cell.spread.median

    def is_cached(self, cell: BenchCell) -> bool:
        """Whether the copy's speed is a cell's roofline although a cache holds all that it touches, and is faster."""
        limits = self._limits(cell)
        if limits is None or cell.touched is None or "cache" not in self.machine:
            return False
        arithmetic, memory = limits
        return memory > arithmetic and cell.touched <= self.machine["cache"]["bytes"]

    def _limits(self, cell: BenchCell) -> tuple[float, float] | None:
        """Seconds that a call's arithmetic and its memory traffic take at the least."""
        if cell.spread is None or cell.unit != "ms" or cell.operations is None or cell.bytes is None:
            return None
        dtype = next((name for name in self.machine.get("matmul", {}) if name in cell.workload), None)
        if dtype is None or "copy" not in self.machine:
            return None
        return cell.operations / self.machine["matmul"][dtype], cell.bytes / self.machine["copy"]["bytes a second"]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, each cell with its ratio and share of the roofline for other programs to read."""
        cells = []
        for cell in self.cells:
            entry = {name: value for name, value in asdict(cell).items() if value not in (None, {}, ())}
            derived: dict[str, float | bool | None] = {
                "ratio": self.ratio(cell),
                "of_roofline": self.of_roofline(cell),
            }
            if cell.spread:
                derived["median"] = cell.spread.median
            if self.is_cached(cell):
                derived["cached"] = True
            cells.append(entry | {name: value for name, value in derived.items() if value is not None})
        parts = {"environment": self.environment, "machine": self.machine, "settings": self.settings}
        return {"format": FORMAT, **parts, "cells": cells}


def read_result(path: Path) -> BenchResult:
    """Result that a run of the bench wrote as JSON.

    Raises:
        UsageError: the file cannot be read or holds no such result.
    """
    try:
        data = parse_json(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {path}: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("cells"), list):
        raise UsageError(f"cannot read {path}: it is not a result of `diffquant bench` in format {FORMAT}")
    try:
        cells = tuple(cell_of(entry) for entry in data["cells"])
        return BenchResult(data["environment"], data["machine"], data["settings"], cells)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read {path}: a cell is damaged ({error})") from error


def cell_of(entry: dict[str, Any]) -> BenchCell:
    """The cell that `dataclasses.asdict` or `BenchResult.to_dict` made plain data."""
    names = set(BenchCell.__dataclass_fields__)
    known = {name: value for name, value in entry.items() if name in names}
    return BenchCell(**known | {"values": tuple(float(value) for value in known.get("values", ()))})
