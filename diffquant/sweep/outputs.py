"""The files that a sweep leaves in its folder beside its cells: table, plots and report."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.evals.task import PlottedCell, Task
from diffquant.evals.tasks import kind_of, task_kinds
from diffquant.report.page import page
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles
from diffquant.sweep.plot import panel_title, plot
from diffquant.sweep.report import sweep_report
from diffquant.sweep.result import SweepResult, model_names
from diffquant.sweep.table import csv_table


def run_files() -> RunFiles:
    """The files of a sweep beside its cells, its tasks' own plots among them."""
    plots = (name for kind in task_kinds() for name in kind.plots)
    return RunFiles("sweep.json", frozenset({"settings", "cells"}), ("table.csv", "report.html", "plot.png", *plots))


def write_outputs(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write table.csv, plot.png, the plots of its tasks such as needle's places.png, and report.html.

    Plots without data are left out.
    """
    table, report = folder / "table.csv", folder / "report.html"
    write_atomically(table, csv_table(sweep))
    plots = {"plot.png": partial(plot, sweep)}
    for kind in task_kinds():
        plots |= {name: partial(draw, plotted_cells(sweep, kind)) for name, draw in kind.plots.items()}
    drawn = [folder / name for name, draw in plots.items() if _draw_if_any(draw, folder / name)]
    files = ["sweep.json", *(file.name for file in (table, *drawn))]
    write_atomically(report, page(sweep_report(sweep, folder.absolute().name, files)))
    return [table, *drawn, report]


def plotted_cells(sweep: SweepResult, kind: type[Task]) -> Sequence[PlottedCell]:
    """The results of one kind of task, in the form that its plots take."""
    names = model_names([point.model for point in sweep.points])
    return [
        PlottedCell(
            names[cell.point.model],
            panel_title(cell.point),
            cell.point.scheme,
            cell.point.is_baseline,
            cell.task,
            cell.result,
        )
        for cell in sweep.cells
        if cell.result and kind_of(cell.task) is kind
    ]


def _draw_if_any(draw: "partial[None]", path: Path) -> bool:
    """Draw into a file; returns whether there was anything to draw. If not, an earlier run's drawing goes."""
    try:
        draw(path)
    except UsageError:
        path.unlink(missing_ok=True)
        return False
    return True
