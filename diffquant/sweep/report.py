"""The report of a sweep: losses by width, scores, table, statistics of each layer's quantizer, settings."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.report.page import Block, Charts, Fold, Items, Report, Section, Table
from diffquant.report.plots import key_of
from diffquant.sweep.headline import headline
from diffquant.sweep.plot import Band, bands, bars_text, charts
from diffquant.sweep.result import MeasuredCell, SweepResult, model_names
from diffquant.sweep.sizes import SMALL_KL, recommendations, size_charts, sized
from diffquant.sweep.table import cells_of, notes


def sweep_report(sweep: SweepResult, name: str, files: Sequence[str]) -> Report:
    """Make the report of a sweep.

    Args:
        name: name of the run.
        files: names of the files beside the page, to link to.
    """
    drawn = bands(sweep)
    sections = [
        *_failures_section(sweep),
        *_sizes_sections(sweep),
        *_charts_sections(drawn),
        Section("Results", [_results_table(sweep), *notes(sweep)]),
        *_logits_section(sweep),
        Section("Settings", [_settings_facts(sweep)]),
    ]
    return Report("sweep", name, headline(sweep), sweep.settings["date"], sections, files)


def _sizes_sections(sweep: SweepResult) -> list[Section]:
    """The recommendation: sizes against KL, and the smallest that changes little."""
    found = sized(sweep)
    if not found:
        return []
    names = model_names([point.model for point in sweep.points])
    # A folder whose weights are packed is no source of another one; a GGUF file is.
    packed = {path for path in sweep.settings["quantized"] if not path.lower().endswith(".gguf")}
    path_of = {name: str(model) for model, name in names.items() if str(model) not in packed}
    drawings, keys = size_charts(found)
    table, commands = recommendations(found, path_of)
    rule = (
        f"Taken is each model's smallest configuration whose KL from 16 bits stays below {SMALL_KL} nats, the upper "
        "end of its 95 % interval where it has one, and 16 bits where none does. In the drawings lower and further "
        "left is better; bars: 95 % intervals."
    )
    return [Section("Which to take", [table, commands, Charts(drawings, keys), rule])]


def _charts_sections(drawn: Sequence[Band]) -> list[Section]:
    """One section per task: its change from 16 bits, and below that its scores."""
    models = list(dict.fromkeys(model for band in drawn for model in band.models))
    keys = [key_of(number, model) for number, model in enumerate(models)]
    sections = []
    for task in dict.fromkeys(band.task for band in drawn):
        mine = [band for band in drawn if band.task == task]
        blocks: list[Block] = []
        for band in mine:
            legend = keys if band is mine[0] else ()
            blocks.append(Section(band.label[0].upper() + band.label[1:], [Charts(charts(band, models), legend)]))
        sections.append(Section(task, [*blocks, f"{bars_text(mine).capitalize()}."]))
    return sections


def _failures_section(sweep: SweepResult) -> list[Section]:
    if not sweep.failed:
        return []
    names = model_names([point.model for point in sweep.points])
    reasons = [f"{names[c.point.model]}, {c.point.label}, {c.task}: {c.error}" for c in sweep.failed]
    return [Section(f"{len(sweep.failed)} of {len(sweep.cells)} cells failed", [Items(reasons, errors=True)])]


def _results_table(sweep: SweepResult) -> Table:
    heads, lines = cells_of(sweep)
    return Table(heads, lines, [point.is_baseline for point in sweep.points], names=3)


def _logits_section(sweep: SweepResult) -> list[Section]:
    """The section on scales and clipping by layer, with one fold per cell."""
    names = model_names([point.model for point in sweep.points])
    reported = [cell for cell in sweep.cells if cell.logit_report]
    folds = [
        Fold(f"{names[c.point.model]}, {c.point.label}, {c.task}: {_clipping_text(c)}", [_layers_table(c)])
        for c in reported
    ]
    if not folds:
        return []
    explained = (
        "A scale is the distance between two neighbouring codes, in units of the logits; an entry is clipped where it "
        "lies outside the codes. Mean and largest scale are over all scales of a layer."
    )
    opened = Fold(f"{len(folds)} cells with quantized logits", [explained, *folds])
    return [Section("Logit quantizers, layer by layer", [opened])]


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


def _settings_facts(sweep: SweepResult) -> dict[str, str]:
    settings, names = sweep.settings, model_names([point.model for point in sweep.points])
    flat = {key.replace("_", " "): value for key, value in settings["options"].items()}
    flat |= {f"version of {name}": value for name, value in settings["versions"].items()}
    flat |= {f"task {task['name']}": _value_text(task) for task in settings["tasks"]}
    flat |= {f"SHA-256 of {names.get(Path(path), path)}": digest for path, digest in settings["models"].items()}
    flat["dtype"] = settings["dtype"]
    flat["commit"] = settings.get("commit") or "not recorded"
    return {name: _value_text(value) for name, value in flat.items() if value not in (None, "", [], ())}


def _value_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if key != "name" and inner is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
