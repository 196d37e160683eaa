"""What a sweep leaves in its folder beside its cells."""

from collections.abc import Callable
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from diffquant.sweep.places import plot_places
from diffquant.sweep.plot import plot
from diffquant.sweep.report import write_report
from diffquant.sweep.result import SweepResult
from diffquant.sweep.shots import plot_shots
from diffquant.sweep.table import csv_table


def write_outputs(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write table.csv, plot.png, of needle cells places.png, of many-shot ones shots.png, and report.html.

    A plot of nothing is left out.
    """
    table, report = folder / "table.csv", folder / "report.html"
    write_atomically(table, csv_table(sweep))
    write_report(sweep, report)
    drawn = [folder / name for name, draw in _PLOTS.items() if _draws(draw, sweep, folder / name)]
    return [table, *drawn, report]


_PLOTS = {"plot.png": plot, "places.png": plot_places, "shots.png": plot_shots}


def _draws(draw: Callable[[SweepResult, Path], None], sweep: SweepResult, path: Path) -> bool:
    """Draw, unless there is nothing to."""
    try:
        draw(sweep, path)
    except UsageError:
        return False
    return True
