"""Reports of a result: Markdown, CSV, and one HTML file with everything in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffquant.bench.cells import BenchCell, BenchResult
from diffquant.bench.contest.contest import SECTIONS
from diffquant.bench.contest.throughput import SECTION as THROUGHPUT
from diffquant.bench.contest.throughput import table7
from diffquant.bench.plots import Plot, plots
from diffquant.report import tables
from diffquant.report.page import Block, Drawing, Fold, Items, Report, Section, Table

_HEADS = ["path", "median", "spread", "× baseline", "of roofline", "peak MB", "Gop", "MB moved", "error from naive"]
_NOTES = (
    "Every path ran in turns with the others of its table; medians, and the smallest and largest repeat as spread.",
    "× baseline is how many times better than the shaded row; of roofline is the share of the speed that this "
    "machine's measured copy and matrix product allow for the operations and bytes counted.",
    "Where an error stands, the path's output was compared with the plain form on the same random, non-zero data "
    "before it was timed; a path that was wrong is not timed.",
    "Peak memory of sections that run whole programs is what the process took at most, for quantize and export without "
    "mapped files.",
)
_CACHED = (
    "A share marked “cached” is of the copy's speed, but the machine's largest cache holds all that the calls touch "
    "and is faster than the copy: it says little about the path."
)
_MEMORY = (
    "Peak memory of attention and decode is what a call took beyond its inputs, what it returns included: on a CPU the "
    "growth of a fresh process, to a quarter of a megabyte."
)
_LINEAR = (
    "A linear layer's product was compared with that of the values its codes stand for, and these with the weight "
    "(rounding error)."
)


@dataclass(frozen=True)
class _Table:
    section: str
    workload: str
    heads: list[str]
    rows: list[list[str]]
    baselines: list[bool]
    missing: list[tuple[str, str]]


def markdown(result: BenchResult) -> str:
    """Markdown tables by section and workload, with the paths that could not be measured below each."""
    lines = ["# diffquant bench", "", f"{_machine(result)}", ""]
    for table in _tables(result):
        lines += [f"## {table.section}: {table.workload}", ""]
        if table.rows:
            lines += [*tables.markdown(table.heads, table.rows), ""]
        lines += [f"- {path}: none, {reason}" for path, reason in table.missing] + [""]
    seven = table7([cell for cell in result.cells if cell.section == THROUGHPUT])
    if seven.count("\n") > 1:
        lines += ["## Throughput, forward, in the form of arXiv 2410.05258, Table 7", "", seven, ""]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(result)), ""])


def csv_table(result: BenchResult) -> str:
    """CSV with a line for each cell, numbers in full."""
    records = []
    for entry in result.to_dict()["cells"]:
        facts = {f"fact {name}": value for name, value in entry.pop("facts", {}).items()}
        values = entry.pop("values", ())
        records.append(
            entry
            | {"repeats": len(values), "low": min(values, default=None), "high": max(values, default=None)}
            | facts
        )
    return tables.csv_text(records)


def bench_report(result: BenchResult, name: str, files: Sequence[str]) -> Report:
    """The report of a result.

    Args:
        name: name of the run.
        files: names of the files beside the page that it leads to.
    """
    drawings, workloads = plots(result), _tables(result)
    sections = [
        Section(name, [*_drawn(name, drawings), *(_timed(table) for table in workloads if table.section == name)])
        for name in dict.fromkeys(table.section for table in workloads)
    ]
    about = Section("How it was measured", [_machine(result), *_notes(result)])
    settings = Section("Settings", [_settings(result)])
    date = str(result.environment["date"])
    return Report("bench", name, _headline(result), date, [*sections, about, settings], files)


def _headline(result: BenchResult) -> list[str]:
    """For each section the path that does best beside the baseline, on the longest of its workloads."""
    sentences = []
    for section in dict.fromkeys(cell.section for cell in result.cells):
        longest = max((cell.length or 0 for cell in result.cells if cell.section == section), default=0)
        rivals = [
            (ratio, cell)
            for cell in result.cells
            if cell.section == section and (cell.length or 0) == longest and cell.path != cell.baseline
            if (ratio := result.ratio(cell)) is not None
        ]
        if rivals:
            ratio, best = max(rivals, key=lambda rival: rival[0])
            sentences.append(
                f"{section}: {best.path} is {ratio:.2f} times as good as {best.baseline} ({best.workload})."
            )
    missing = sum(cell.missing is not None for cell in result.cells)
    return [*sentences, *([f"{missing} of {len(result.cells)} could not be measured."] if missing else [])]


def _drawn(section: str, drawings: Sequence[Plot]) -> list[Block]:
    mine = [plot for plot in drawings if plot.name.startswith(f"{section}-")]
    return [Section(plot.title, [Drawing(plot.svg())]) for plot in mine]


def _timed(table: _Table) -> Section:
    blocks: list[Block] = []
    if table.rows:
        blocks.append(Table(table.heads, table.rows, table.baselines))
    if table.missing:
        reasons = Items([f"{path}: none, {reason}" for path, reason in table.missing])
        blocks.append(Fold(f"{len(table.missing)} not measured", [reasons]))
    return Section(table.workload, blocks)


def _tables(result: BenchResult) -> list[_Table]:
    """A table for each workload, without the columns that are empty."""
    by_workload = []
    for section, workload in dict.fromkeys((cell.section, cell.workload) for cell in result.cells):
        cells = [cell for cell in result.cells if (cell.section, cell.workload) == (section, workload)]
        timed = [cell for cell in cells if cell.values]
        extra = list(dict.fromkeys(name for cell in timed for name in cell.facts))
        rows = [[*_texts(cell, result), *(_fact(cell, name) for name in extra)] for cell in timed]
        filled = [i for i in range(len(_HEADS) + len(extra)) if any(row[i] != "-" for row in rows)]
        heads = [*_HEADS, *(_fact_head(name) for name in extra)]
        by_workload.append(
            _Table(
                section,
                workload,
                [heads[i] for i in filled],
                [[row[i] for i in filled] for row in rows],
                [cell.path == cell.baseline for cell in timed],
                [(cell.path, cell.missing) for cell in cells if cell.missing],
            )
        )
    return by_workload


def _texts(cell: BenchCell, result: BenchResult) -> list[str]:
    spread, ratio, share = cell.spread, result.ratio(cell), result.of_roofline(cell)
    if spread is None:
        return [cell.path, *["-"] * (len(_HEADS) - 1)]
    return [
        cell.path,
        f"{spread.median:.4g} {cell.unit}",
        f"{spread.low:.4g} to {spread.high:.4g}" if len(cell.values) > 1 else "-",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if share is None else f"{share:.0%}{', cached' if result.is_cached(cell) else ''}",
        "-" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e6:.1f}",
        "-" if cell.operations is None else f"{cell.operations / 1e9:.3g}",
        "-" if cell.bytes is None else f"{cell.bytes / 1e6:.1f}",
        "-" if cell.error is None else f"{cell.error:.0e}",
    ]


def _fact_head(name: str) -> str:
    return name.replace("_bytes", ", MB").replace(" bytes", ", MB").replace("_", " ")


def _fact(cell: BenchCell, name: str) -> str:
    if name not in cell.facts:
        return "-"
    value = cell.facts[name]
    return f"{value / 1e6:.1f}" if name.endswith("bytes") else f"{value:.4g}"


def _notes(result: BenchResult) -> list[str]:
    """Sentences about how the cells were measured that are there."""
    notes = list(_NOTES)
    if "cache" in result.machine:
        notes.append(_CACHED)
    if any(cell.peak_bytes and cell.section in SECTIONS for cell in result.cells):
        notes.append(_MEMORY)
    if any("rounding error" in cell.facts for cell in result.cells):
        notes.append(_LINEAR)
    return notes


def _machine(result: BenchResult) -> str:
    about = result.environment
    where = f"{about.get('device')}, {about.get('cores')} cores, {result.settings.get('threads')} threads"
    copy = result.machine["copy"]["bytes a second"] / 1e9
    matmul = ", ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in result.machine["matmul"].items())
    parts = [f"{about['date']}, {where}", f"measured: copy {copy:.1f} GB/s, matrix product {matmul}"]
    if "cache" in result.machine:
        parts.append(f"largest cache {result.machine['cache']['bytes'] / 1e6:.0f} MB")
    else:
        parts.append("largest cache not recorded, so no share is marked as cached")
    peaks = result.settings.get("peak memory")
    if peaks is not None:
        parts.append("peak memory of attention and decode: " + ", ".join(f"{k} {v}" for k, v in peaks.items()))
    return "; ".join(parts)


def _settings(result: BenchResult) -> dict[str, str]:
    flat: dict[str, Any] = dict(result.settings)
    flat |= {name: value for name, value in result.environment.items() if name != "versions"}
    flat |= {f"version of {name}": value or "not installed" for name, value in result.environment["versions"].items()}
    return {name: _listed(value) for name, value in flat.items()}


def _listed(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
