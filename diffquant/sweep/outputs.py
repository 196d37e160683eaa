"""What a sweep leaves in its folder beside its cells."""

from pathlib import Path

from diffquant.checkpoint.staging import write_atomically
from diffquant.errors import UsageError
from diffquant.sweep.plot import plot
from diffquant.sweep.report import write_report
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import csv_table


def write_outputs(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write table.csv, plot.png and report.html; the plot is left out where there is nothing to draw."""
    table, picture, report = (folder / name for name in ("table.csv", "plot.png", "report.html"))
    write_atomically(table, csv_table(sweep))
    write_report(sweep, report)
    try:
        plot(sweep, picture)
    except UsageError:
        return [table, report]
    return [table, picture, report]
