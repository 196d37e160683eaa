"""The files that summarize a sweep: table, plots and report, with its findings in a sentence or two per task."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diffquant.measure.cells import SweepPoint
from diffquant.measure.results import POINTS
from diffquant.measure.stats import Difference
from diffquant.measure.sweep.plot import TaskPanels, draw_panels, explain_bars, list_panel_rows, plot
from diffquant.measure.sweep.result import SweepResult, csv_table, notes, results_table
from diffquant.measure.tasks import task_class_named, task_kinds
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


# Loss in percentage points that an interval must exclude before "no measurable loss" is informative.
_SETTLED = 1.0


def summarize_findings(sweep: SweepResult) -> list[str]:
    """Summarize a sweep in a sentence or two per task; failures first."""
    sentences = [f"{len(sweep.failed_cells)} of {len(sweep.cells)} cells failed."] if sweep.failed_cells else []
    for task in sweep.tasks:
        changes = _leading_changes(sweep, task)
        if changes:
            tell = _summarize_items if task_class_named(task).columns.by_item else _summarize_text
            sentences.append(f"{task}: {tell(sweep, task, changes)}")
    return sentences or ["Nothing here is compared with 16 bits."]


def _leading_changes(sweep: SweepResult, task: str) -> list[tuple[SweepPoint, Difference]]:
    """Return changes from 16 bits by the first measure with data; in tasks scored by item, it must have a sign."""
    columns = task_class_named(task).columns
    for change in columns.change_metrics:
        if columns.by_item and change.is_log:
            continue
        measured = [(point, change.estimate(*sweep.result_and_baseline(point, task))) for point in sweep.points]
        if changes := [(point, drawn) for point, drawn in measured if drawn is not None]:
            return changes
    return []


def _summarize_items(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str:
    if all(math.isinf(drawn.low) for _, drawn in changes):
        return "one item cannot show a loss."
    worst, _ = min(changes, key=lambda change: change[1].mean)
    lower = [point.bits for point, drawn in changes if drawn.high < 0]
    of_all = f"of {len(changes)} configurations"
    if not lower:
        return _explain_resolution(sweep, task, changes) or (
            f"no measurable loss in any {of_all}, and a loss of {_SETTLED:.0f} point is ruled out; the lowest is "
            f"{_describe(sweep, worst, task)}."
        )
    losses = f"{len(lower)} {of_all} lose; the largest loss is that of {_describe(sweep, worst, task)}."
    safe = min((point.bits for point, _ in changes if point.bits > max(lower)), default=None)
    return losses if safe is None else f"{losses} From {safe} bits up no loss is measurable."


def _explain_resolution(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str | None:
    """State which loss too few items cannot show, and what KL shows; return None if the items suffice."""
    points = [drawn for point, _ in changes if (drawn := POINTS.estimate(*sweep.result_and_baseline(point, task)))]
    if all(drawn.low >= -_SETTLED for drawn in points):
        return None
    widest = max((drawn.high - drawn.low) / 2 for drawn in points)
    items = max(
        len(result.values or ()) for point, _ in changes for result in sweep.result_and_baseline(point, task) if result
    )
    text = f"{items} items cannot show a loss below {widest:.0f} points; "
    measured = [(point, kl) for point, _ in changes if (kl := _kl(sweep, point, task)) and kl.low > 0]
    if not measured:
        return f"{text}use more items, or KL."
    most = max(measured, key=lambda each: each[1].mean)[0]
    return (
        f"{text}KL shows a change in {len(measured)} of {len(changes)} configurations, the largest in "
        f"{_describe(sweep, most, task)}."
    )


def _summarize_text(sweep: SweepResult, task: str, changes: Sequence[tuple[SweepPoint, Difference]]) -> str:
    # A change in nats has a sign, and a large gain is a large change.
    ordered = sorted(changes, key=lambda change: abs(change[1].mean))
    least, most = (_describe(sweep, point, task) for point, _ in (ordered[0], ordered[-1]))
    return f"{most}." if len(ordered) == 1 else f"the smallest change is that of {least}; the largest that of {most}."


def _describe(sweep: SweepResult, point: SweepPoint, task: str) -> str:
    """Return a configuration's name and all of its measured changes, in words."""
    known = [
        (change.words, change.estimate(*sweep.result_and_baseline(point, task)))
        for change in task_class_named(task).columns.change_metrics
    ]
    texts = [words(drawn) for words, drawn in known if words and drawn]
    return ", ".join([f"{sweep.names[point.model]} at {point.label}", *texts])


def _kl(sweep: SweepResult, point: SweepPoint, task: str) -> Difference | None:
    """Return a configuration's KL from 16 bits, or None if the task does not measure it."""
    metric = next((change for change in task_class_named(task).columns.change_metrics if change.is_log), None)
    return metric.estimate(*sweep.result_and_baseline(point, task)) if metric else None
