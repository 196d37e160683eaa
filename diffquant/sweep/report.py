"""One HTML file with everything in it: table, plot, settings, and what each layer's logit quantizer did."""

from html import escape
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from diffquant.support.plain_data import JsonObject
from diffquant.sweep.plot import svg
from diffquant.sweep.result import Measured, SweepResult, model_names
from diffquant.sweep.table import cells_of, notes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #999; } th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
tr.baseline td { background: #f3f6fa; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.note { color: #555; font-size: .87rem; } .error { color: #a40000; }
dl { display: grid; grid-template-columns: max-content auto; gap: .15rem 1.2rem; font-size: .87rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def write_report(sweep: SweepResult, path: Path) -> None:
    """Write the report atomically."""
    write_atomically(path, report(sweep))


def report(sweep: SweepResult) -> str:
    """The whole document; it loads nothing."""
    parts = [
        "<h1>diffquant sweep</h1>",
        f'<p class="note">{escape(sweep.settings["date"])}</p>',
        *_failures(sweep),
        "<h2>Results</h2>",
        _results(sweep),
        *[f'<p class="note">{escape(note)}</p>' for note in notes(sweep)],
        *_plot(sweep),
        *_logits(sweep),
        "<h2>Settings</h2>",
        _settings(sweep.settings),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>diffquant sweep</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _failures(sweep: SweepResult) -> list[str]:
    if not sweep.failed:
        return []
    names = model_names([point.model for point in sweep.points])
    items = [f"{names[c.point.model]}, {c.point.label}, {c.task}: {c.error}" for c in sweep.failed]
    return [
        f"<h2>{len(sweep.failed)} of {len(sweep.cells)} cells failed</h2>",
        '<ul class="error">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>",
    ]


def _results(sweep: SweepResult) -> str:
    heads, lines = cells_of(sweep)
    classes = ["baseline" if point.is_baseline else "" for point in sweep.points]
    return _table(heads, lines, classes)


def _plot(sweep: SweepResult) -> list[str]:
    try:
        drawing = svg(sweep)
    except UsageError:
        return []
    return ["<h2>Against bits</h2>", f'<div class="wide">{drawing}</div>']


def _logits(sweep: SweepResult) -> list[str]:
    """Steps and clipping by layer, one fold a cell."""
    names = model_names([point.model for point in sweep.points])
    reported = [cell for cell in sweep.cells if cell.logit_report]
    folds = [
        f"<details><summary>{escape(f'{names[c.point.model]}, {c.point.label}, {c.task}')}: {_clipping(c)}</summary>"
        f"{_layers(c)}</details>"
        for c in reported
    ]
    if not folds:
        return []
    explained = (
        "A step is the distance between two neighbouring codes, in units of the logits; an entry is clipped where it "
        "lies outside the codes. Mean and largest step are over all scales of a layer."
    )
    return ["<h2>Logit quantizers, layer by layer</h2>", f'<p class="note">{explained}</p>', *folds]


def _clipping(cell: Measured) -> str:
    layers = cell.logit_report
    entries, clipped = (sum(layer[name] for layer in layers) for name in ("entries", "clipped"))
    steps = [layer["step_mean"] for layer in layers]
    return f"mean step {min(steps):.3g} to {max(steps):.3g}, clipped {clipped / max(1, entries):.2%}"


def _layers(cell: Measured) -> str:
    heads = ["layer", "calls", "entries", "clipped", "mean step", "largest step"]
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
    return _table(heads, lines, [""] * len(lines))


def _settings(settings: JsonObject) -> str:
    flat = {f"{name} {key}": value for name in ("options", "versions") for key, value in settings[name].items()}
    flat |= {f"task {task['name']}": _listed(task) for task in settings["tasks"]}
    flat |= {f"SHA-256 of {Path(path).name}": digest for path, digest in settings["models"].items()}
    flat["dtype"] = settings["dtype"]
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(_listed(v))}</dd>" for k, v in flat.items()) + "</dl>"


def _listed(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if key != "name")
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "default" if value is None else str(value)


def _table(heads: list[str], lines: list[list[str]], classes: list[str]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(
        f'<tr class="{name}">' + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>\n"
        for line, name in zip(lines, classes, strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
