"""Outliers for people: a table of the models, a plot of their layers, the numbers as JSON."""

from pathlib import Path
from typing import Any

from diffquant.calib.analysis.outlier_result import HIDDEN, LOGITS, RANKS, Magnitude, ModelOutliers, Outliers
from diffquant.report.page import Charts, Drawing, Key, Report, Section, Table, page
from diffquant.report.plots import GLYPHS, Tips, as_svg, literal, look, new_figure, plain_log_scale, tidy
from diffquant.report.tables import aligned
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles

TITLES = {LOGITS: "attention logits, |q·k|/√d", HIDDEN: "hidden states, |layer output|"}
# What is drawn of each layer: the largest magnitude, the hundredth, the middle one.
STATISTICS = ("top 1", "top 100", "median")


def outlier_table(outliers: Outliers) -> str:
    """A table of every model over all its layers, like the paper's Table 5."""
    lines = [[name if kind == LOGITS else "", kind, *rest] for name, kind, *rest in _lines(outliers)]
    return "\n".join([*aligned(_HEADS, lines, names=2), "", _note(outliers)])


def outlier_report(outliers: Outliers, name: str) -> Report:
    """The report of outliers.

    Args:
        name: name of the run.
    """
    keys = [Key(look(number)["color"], GLYPHS[look(number)["marker"]], text) for number, text in enumerate(STATISTICS)]
    sections = [
        Section(TITLES[kind].capitalize(), [Charts(_drawings(outliers, kind), keys)]) for kind in (LOGITS, HIDDEN)
    ]
    sections.append(Section("All layers", [Table(_HEADS, _lines(outliers), names=2), _note(outliers)]))
    facts = {name: str(value) for name, value in outliers.settings.items() if not isinstance(value, dict)}
    sections.append(Section("Settings", [facts]))
    date = outliers.settings.get("date", "")
    return Report("outliers", name, _headline(outliers), date, sections, ["outliers.json", "outliers.png"])


def _headline(outliers: Outliers) -> list[str]:
    sentences = []
    for kind, noun in ((LOGITS, "attention logit"), (HIDDEN, "hidden state")):
        largest = max(outliers.models, key=lambda model: model.overall[kind].top[1])
        magnitude = largest.overall[kind]
        ratio = f", {magnitude.top[1] / magnitude.median:,.0f} times its median" if magnitude.median else ""
        sentences.append(f"The largest {noun} is {_number(magnitude.top[1])} in {largest.name}{ratio}.")
    return sentences


def _drawings(outliers: Outliers, kind: str) -> list[Drawing]:
    """A drawing for each model, all on one scale."""
    magnitudes = [layer[kind] for model in outliers.models for layer in model.layers if kind in layer]
    shown = [value for each in magnitudes for name in STATISTICS if (value := _statistic(each, name)) > 0]
    drawings = []
    for model in outliers.models:
        figure, tips = new_figure(4.4, 3.0), Tips()
        axis = figure.subplots()
        draw_model(axis, model, kind, tips)
        axis.set_ylim(0.8 * min(shown), 1.25 * max(shown))
        plain_log_scale(axis)
        axis.set_xlabel("layer")
        axis.set_ylabel("magnitude")
        drawings.append(Drawing(as_svg(figure, f"{model.name}: {TITLES[kind]} by layer", tips), model.name))
    return drawings


_HEADS = ("model", "activation", *(f"top {rank}" for rank in RANKS), "median", "top 1 / median", "values")


def _lines(outliers: Outliers) -> list[list[str]]:
    return [[model.name, kind, *_cells(model.overall[kind])] for model in outliers.models for kind in (LOGITS, HIDDEN)]


def _note(outliers: Outliers) -> str:
    tokens = ", ".join(dict.fromkeys(f"{model.tokens:,}" for model in outliers.models))
    return (
        f"{tokens} tokens in windows of {outliers.settings['window']}; largest magnitudes are exact, "
        f"medians within {outliers.settings['median_error']:.1%}"
    )


FILES = RunFiles("outliers.json", frozenset({"models", "settings"}), ("outliers.png", "outliers.html"))


def write_outliers(outliers: Outliers, folder: Path) -> list[Path]:
    """Write outliers.json, outliers.png and outliers.html into a folder that `FILES` has checked."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture, report = (folder / f"outliers.{end}" for end in ("json", "png", "html"))
    write_atomically(data, outliers.to_json())
    plot_outliers(outliers, picture)
    write_atomically(report, page(outlier_report(outliers, folder.absolute().name)))
    return [data, picture, report]


def plot_outliers(outliers: Outliers, path: Path) -> None:
    """Draw the largest magnitudes and the median of each layer; the suffix says the format.

    A row of panels is a kind of activation, on one scale, and a column a model.
    """
    figure = new_figure(1.0 + max(2.9 * len(outliers.models), 5.0), 5.6)
    panels = figure.subplots(2, len(outliers.models), squeeze=False, sharex="col", sharey="row")
    for row, kind in zip(panels, (LOGITS, HIDDEN), strict=True):
        for axis, model in zip(row, outliers.models, strict=True):
            draw_model(axis, model, kind)
            axis.set_title(literal(model.name) if kind == LOGITS else "", fontsize=10)
            axis.set_xlabel("layer" if kind == HIDDEN else "")
        plain_log_scale(row[0])
        row[0].set_ylabel(TITLES[kind])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STATISTICS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def draw_model(axis: Any, model: ModelOutliers, kind: str, tips: Tips | None = None) -> None:
    """Draw one model's magnitudes of a kind by layer."""
    from matplotlib.ticker import MaxNLocator

    layers = [number for number, layer in enumerate(model.layers) if kind in layer]
    for number, name in enumerate(STATISTICS):
        values = [_statistic(model.layers[layer][kind], name) for layer in layers]
        axis.plot(layers, values, markersize=4, linewidth=1.3, label=name, **look(number))
        if tips:
            for layer, value in zip(layers, values, strict=True):
                tips.mark(axis, layer, value, f"layer {layer}, {name}: {_number(value)}")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    tidy(axis)


def _statistic(magnitude: Magnitude, name: str) -> float:
    return magnitude.median if name == "median" else magnitude.top.get(int(name.split()[1]), float("nan"))


def _cells(magnitude: Magnitude) -> list[str]:
    top = [_number(magnitude.top[rank]) if rank in magnitude.top else "-" for rank in RANKS]
    ratio = f"{magnitude.top[1] / magnitude.median:,.0f}" if magnitude.median else "-"
    return [*top, _number(magnitude.median), ratio, f"{magnitude.count:,}"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"
