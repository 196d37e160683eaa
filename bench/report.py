"""Reports of a benchmark's result: Markdown, CSV, and an HTML page with everything."""

import re
from collections.abc import Sequence
from typing import Any

from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.benchmarks.contest import SECTIONS
from diffquant.benchmarks.plots import plot_names, plots
from diffquant.reports.page import Block, Charts, Report, Section, format_settings
from diffquant.reports.plots import as_svg
from diffquant.reports.tables import Table, format_csv

_HEADS = ["path", "median", "spread", "× baseline", "peak MB", "error from naive"]
_NOTES = (
    "All paths of a table were timed alternately. Times are medians; spread is the smallest and the largest repeat.",
    "“× baseline”: how many times better than the shaded row.",
    "If an error is given, the path's output was compared with the naive attention on the same random, non-zero data "
    "before it was timed. A path with a wrong result is not timed.",
    "In sections that run whole programs, peak memory is that of the process; for quantize and export, memory-mapped "
    "files do not count.",
)
_MEMORY = (
    "Peak memory of attention and decode includes a call's result, but not its inputs. On a CPU it is the growth of a "
    "new process, accurate to a quarter of a megabyte."
)
_LINEAR = (
    "A linear layer's result was compared with the product of the dequantized weight, and that with the original "
    "weight (rounding error)."
)


def markdown(result: BenchResult) -> str:
    """Return Markdown with a table for each section and workload, and the reasons why paths could not be measured."""
    lines = ["# diffquant bench", "", f"{_machine(result)}", ""]
    for (section, workload), (table, missing) in _tables(result).items():
        lines += [f"## {section}: {workload}", "", *([*table.markdown(), ""] if table.rows else [])]
        lines += [f"- {reason}" for reason in missing] + [""]
    return "\n".join([*lines, *(f"- {note}" for note in _notes(result)), ""])


def csv_table(result: BenchResult) -> str:
    """Return CSV with a line of unrounded numbers for each cell."""
    records = []
    for entry in result.to_dict()["cells"]:
        facts = {f"fact {name}": value for name, value in entry.pop("facts", {}).items()}
        values = entry.pop("values", ())
        records.append(
            entry
            | {"repeats": len(values), "low": min(values, default=None), "high": max(values, default=None)}
            | facts
        )
    return format_csv(records)


def bench_report(result: BenchResult, name: str, files: Sequence[str]) -> Report:
    """Return the HTML report of a result.

    Args:
        name: name of the run.
        files: names of files in the same folder to link to.
    """
    drawings, tables = plots(result), _tables(result)
    sections = []
    for section in dict.fromkeys(section for section, _ in tables):
        mine = [drawings[plot] for plot in plot_names(section) if plot in drawings]
        shown = [Section(title, [Charts([("", as_svg(figure, title, tips))])]) for title, figure, tips in mine]
        shown += [_workload(workload, *table) for (of, workload), table in tables.items() if of == section]
        sections.append(Section(section, shown))
    about = Section("How it was measured", [_machine(result), *_notes(result)])
    settings = Section("Settings", [_settings(result)])
    date = str(result.environment["date"])
    return Report("bench", name, _headline(result), date, [*sections, about, settings], files)


def _headline(result: BenchResult) -> list[str]:
    """Return a sentence for each section on its best path except the baseline, on the longest of its workloads."""
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


def _workload(name: str, table: Table, missing: Sequence[str]) -> Section:
    blocks: list[Block] = [table] if table.rows else []
    if missing:
        blocks.append(Section(f"{len(missing)} not measured", [list(missing)], folded=True))
    return Section(name, blocks)


def _tables(result: BenchResult) -> dict[tuple[str, str], tuple[Table, list[str]]]:
    """Return a table by section and workload, without empty columns, with the reasons why paths are missing in it."""
    found = {}
    for section, workload in dict.fromkeys((cell.section, cell.workload) for cell in result.cells):
        cells = [cell for cell in result.cells if (cell.section, cell.workload) == (section, workload)]
        timed = [cell for cell in cells if cell.values]
        extra = list(dict.fromkeys(name for cell in timed for name in cell.facts))
        rows = [[*_texts(cell, result), *(_fact(cell, name) for name in extra)] for cell in timed]
        heads = [*_HEADS, *(re.sub("[_ ]bytes", ", MB", name).replace("_", " ") for name in extra)]
        filled = [i for i in range(len(heads)) if any(row[i] != "-" for row in rows)]
        shaded = [cell.path == cell.baseline for cell in timed]
        table = Table([heads[i] for i in filled], [[row[i] for i in filled] for row in rows], shaded)
        found[section, workload] = table, [f"{cell.path}: none, {cell.missing}" for cell in cells if cell.missing]
    return found


def _texts(cell: BenchCell, result: BenchResult) -> list[str]:
    ratio = result.ratio(cell)
    return [
        cell.path,
        f"{cell.median:.4g} {cell.unit}",
        f"{min(cell.values):.4g} to {max(cell.values):.4g}" if len(cell.values) > 1 else "-",
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e6:.1f}",
        "-" if cell.error is None else f"{cell.error:.0e}",
    ]


def _fact(cell: BenchCell, name: str) -> str:
    if name not in cell.facts:
        return "-"
    value = cell.facts[name]
    return f"{value / 1e6:.1f}" if name.endswith("bytes") else f"{value:.4g}"


def _notes(result: BenchResult) -> list[str]:
    """Return sentences about how the cells were measured."""
    notes = list(_NOTES)
    if any(cell.peak_bytes and cell.section in SECTIONS for cell in result.cells):
        notes.append(_MEMORY)
    if any("rounding error" in cell.facts for cell in result.cells):
        notes.append(_LINEAR)
    return notes


def _machine(result: BenchResult) -> str:
    about = result.environment
    where = f"{about.get('device')}, {about.get('cores')} cores, {result.settings.get('threads')} threads"
    peaks = result.settings.get("peak memory")
    measured = "" if peaks is None else ", ".join(f"{name} {value}" for name, value in peaks.items())
    return f"{about['date']}, {where}" + (f"; peak memory of attention and decode: {measured}" if measured else "")


def _settings(result: BenchResult) -> dict[str, str]:
    flat: dict[str, Any] = dict(result.settings)
    flat |= {name: value for name, value in result.environment.items() if name != "versions"}
    flat |= {f"version of {name}": value or "not installed" for name, value in result.environment["versions"].items()}
    return format_settings(flat)
