"""The files that summarize a sweep: table, plots and report."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diffquant.measure.sweep.findings import summarize_findings
from diffquant.measure.sweep.plot import TaskPanels, draw_panels, explain_bars, list_panel_rows, plot
from diffquant.measure.sweep.result import SweepResult, csv_table, notes, results_table
from diffquant.measure.tasks import task_kinds
from diffquant.reports.page import Block, Charts, Report, Section, format_settings, write_run
from diffquant.reports.plots import legend_entry
from diffquant.reports.tables import Table
from diffquant.support.outputs import RunFiles


def sweep_files() -> RunFiles:
    """Return the files that summarize a sweep, including the plots of all tasks, but not the files of cells."""
    plots = (name for kind in task_kinds() for name in kind.plots)
    return RunFiles("sweep.json", frozenset({"settings", "cells"}), ("table.csv", "report.html", "plot.png", *plots))


def write_outputs(sweep: SweepResult, folder: Path) -> list[Path]:
    """Write table.csv, plot.png, each task's own plots and report.html.

    Plots without data are left out. Return the paths of the written files.
    """
    plots = {"plot.png": partial(plot, sweep)}
    for kind in task_kinds():
        plots |= {name: partial(draw, sweep.cells_of(kind)) for name, draw in kind.plots.items()}
    texts = {"table.csv": csv_table(sweep)}
    return write_run(folder, texts, plots, "report.html", partial(sweep_report, sweep), ["sweep.json"])


def sweep_report(sweep: SweepResult, name: str, files: Sequence[str]) -> Report:
    """Make the report of a sweep.

    Args:
        name: name of the run.
        files: names of files in the same folder, to link to.
    """
    drawn = list_panel_rows(sweep)
    sections = [
        *_failures_section(sweep),
        Section("Results", [results_table(sweep), *notes(sweep)]),
        *_charts_sections(drawn),
        *_logits_section(sweep),
        Section("Settings", [_settings_facts(sweep)]),
    ]
    models = list(sweep.names.values())
    name += f": {', '.join(models) if len(models) <= 3 else f'{len(models)} models'}"
    return Report("sweep", name, summarize_findings(sweep), sweep.settings["date"], sections, files)


def _charts_sections(drawn: Sequence[TaskPanels]) -> list[Section]:
    """Make a section per task: its change from 16 bits, and below that its scores."""
    models = list(dict.fromkeys(model for band in drawn for model in band.models))
    keys = [legend_entry(number, model) for number, model in enumerate(models)]
    sections = []
    for task in dict.fromkeys(band.task for band in drawn):
        mine = [band for band in drawn if band.task == task]
        blocks: list[Block] = []
        for band in mine:
            legend, label = keys if band is mine[0] else (), band.metric.label
            blocks.append(Section(label[0].upper() + label[1:], [Charts(draw_panels(band, models), legend)]))
        sections.append(Section(task, [*blocks, f"{explain_bars(mine).capitalize()}."]))
    return sections


def _failures_section(sweep: SweepResult) -> list[Section]:
    if not sweep.failed_cells:
        return []
    reasons = [f"{sweep.caption(cell)}: {cell.error}" for cell in sweep.failed_cells]
    return [Section(f"{len(sweep.failed_cells)} of {len(sweep.cells)} cells failed", [reasons])]


def _logits_section(sweep: SweepResult) -> list[Section]:
    """Make the section on scales and clipping by layer, with one fold per cell."""
    folds = [
        Section(f"{sweep.caption(cell)}: {_clipping_text(layers)}", [_layers_table(layers)], folded=True)
        for cell in sweep.cells
        if cell.result and (layers := cell.result.logit_report)
    ]
    if not folds:
        return []
    explained = (
        "A scale is the distance between two neighbouring codes, in units of the logits; an entry is clipped if it "
        "lies beyond the codes' range. Mean and largest scale are over all scales of a layer."
    )
    opened = Section(f"{len(folds)} cells with quantized logits", [explained, *folds], folded=True)
    return [Section("Logit quantizers, layer by layer", [opened])]


def _clipping_text(layers: Sequence[dict[str, float]]) -> str:
    entries, clipped = (sum(layer[name] for layer in layers) for name in ("entries", "clipped"))
    mean_scales = [layer["step_mean"] for layer in layers]
    return f"mean scale {min(mean_scales):.3g} to {max(mean_scales):.3g}, clipped {clipped / max(1, entries):.2%}"


def _layers_table(layers: Sequence[dict[str, float]]) -> Table:
    heads = ["layer", "calls", "entries", "clipped", "mean scale", "largest scale"]
    lines = [
        [
            str(layer["layer"]),
            f"{layer['calls']:,}",
            f"{layer['entries']:,}",
            f"{layer['clipped'] / max(1, layer['entries']):.2%}",
            f"{layer['step_mean']:.4g}",
            f"{layer['step_max']:.4g}",
        ]
        for layer in layers
    ]
    return Table(heads, lines, names=3)


def _settings_facts(sweep: SweepResult) -> dict[str, str]:
    settings, names = sweep.settings, sweep.names
    flat = {key.replace("_", " "): value for key, value in settings["options"].items()}
    flat |= {f"version of {name}": value for name, value in settings["versions"].items()}
    flat |= {f"task {task['name']}": task for task in settings["tasks"]}
    flat |= {f"SHA-256 of {names.get(Path(path), path)}": digest for path, digest in settings["models"].items()}
    flat["dtype"] = settings["dtype"]
    flat["commit"] = settings.get("commit") or "not recorded"
    return format_settings(flat)
