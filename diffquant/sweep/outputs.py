"""A sweep's files: table, plot and report beside the cells."""

import json
from pathlib import Path

from diffquant.checkpoint.staging import write_atomically
from diffquant.errors import UsageError
from diffquant.sweep.plot import plot
from diffquant.sweep.report import write_report
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import csv_table, json_rows, text_table


def write_outputs(sweep: SweepResult, folder: Path) -> list[str]:
    """Write table.txt, table.csv, table.json, plot.png, plot.svg and report.html.

    Returns:
        Lines to print: the table, then the files.
    """
    table = text_table(sweep)
    write_atomically(folder / "table.txt", table + "\n")
    write_atomically(folder / "table.csv", csv_table(sweep))
    write_atomically(folder / "table.json", json.dumps(json_rows(sweep), indent=1) + "\n")
    files = [folder / "table.csv", folder / "table.json", *_plots(sweep, folder), folder / "report.html"]
    write_report(sweep, folder / "report.html")
    return [*table.split("\n"), "", "written: " + ", ".join(map(str, files))]


def _plots(sweep: SweepResult, folder: Path) -> list[Path]:
    """Nothing to draw is no failure: a sweep of 16 bits alone has no line."""
    files = [folder / "plot.png", folder / "plot.svg"]
    try:
        for file in files:
            plot(sweep, file)
    except UsageError:
        return []
    return files
