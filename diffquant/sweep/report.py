"""The report of a sweep as one HTML file: table, plot, settings, and what each layer's logit quantizer did."""

from pathlib import Path

from diffquant.errors import UsageError
from diffquant.report.page import Drawing, Facts, Fold, Items, Note, Section, Table, page
from diffquant.support.files import write_atomically
from diffquant.support.plain_data import JsonObject
from diffquant.sweep.plot import svg
from diffquant.sweep.result import MeasuredCell, SweepResult, model_names
from diffquant.sweep.table import cells_of, notes


def write_report(sweep: SweepResult, path: Path) -> None:
    """Write the report atomically."""
    write_atomically(path, report_html(sweep))


def report_html(sweep: SweepResult) -> str:
    """The HTML document; it loads nothing from elsewhere."""
    sections = [
        *_failures_section(sweep),
        Section("Results", [_results_table(sweep), *map(Note, notes(sweep))]),
        *_plot_section(sweep),
        *_logits_section(sweep),
        Section("Settings", [Facts(_settings_facts(sweep.settings))]),
    ]
    return page("diffquant sweep", [Note(sweep.settings["date"])], sections)


def _failures_section(sweep: SweepResult) -> list[Section]:
    if not sweep.failed:
        return []
    names = model_names([point.model for point in sweep.points])
    reasons = [f"{names[c.point.model]}, {c.point.label}, {c.task}: {c.error}" for c in sweep.failed]
    return [Section(f"{len(sweep.failed)} of {len(sweep.cells)} cells failed", [Items(reasons, errors=True)])]


def _results_table(sweep: SweepResult) -> Table:
    heads, lines = cells_of(sweep)
    return Table(heads, lines, [point.is_baseline for point in sweep.points], names=3)


def _plot_section(sweep: SweepResult) -> list[Section]:
    try:
        return [Section("Against bits", [Drawing(svg(sweep))])]
    except UsageError:
        return []


def _logits_section(sweep: SweepResult) -> list[Section]:
    """The section of scales and clipping by layer, one fold a cell."""
    names = model_names([point.model for point in sweep.points])
    reported = [cell for cell in sweep.cells if cell.logit_report]
    folds = [
        Fold(f"{names[c.point.model]}, {c.point.label}, {c.task}: {_clipping_text(c)}", _layers_table(c))
        for c in reported
    ]
    if not folds:
        return []
    explained = (
        "A scale is the distance between two neighbouring codes, in units of the logits; an entry is clipped where it "
        "lies outside the codes. Mean and largest scale are over all scales of a layer."
    )
    return [Section("Logit quantizers, layer by layer", [Note(explained), *folds])]


def _clipping_text(cell: MeasuredCell) -> str:
    layers = cell.logit_report
    entries, clipped = (sum(layer[name] for layer in layers) for name in ("entries", "clipped"))
    mean_scales = [layer["step_mean"] for layer in layers]
    return f"mean scale {min(mean_scales):.3g} to {max(mean_scales):.3g}, clipped {clipped / max(1, entries):.2%}"


def _layers_table(cell: MeasuredCell) -> Table:
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
        for layer in cell.logit_report
    ]
    return Table(heads, lines, names=3)


def _settings_facts(settings: JsonObject) -> dict[str, str]:
    flat = {f"{name} {key}": value for name in ("options", "versions") for key, value in settings[name].items()}
    flat |= {f"task {task['name']}": _value_text(task) for task in settings["tasks"]}
    flat |= {f"SHA-256 of {Path(path).name}": digest for path, digest in settings["models"].items()}
    flat["dtype"] = settings["dtype"]
    flat["commit"] = settings.get("commit") or "not recorded"
    return {name: _value_text(value) for name, value in flat.items()}


def _value_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if key != "name")
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "default" if value is None else str(value)
