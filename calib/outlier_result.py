"""Results of `outliers` as plain data, and as a table, plots by layer and an HTML page. Does not import torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diffquant.reports.page import Charts, Drawing, Report, Section, format_settings, write_run
from diffquant.reports.plots import (
    Tips,
    add_tooltip,
    draw_panel,
    escape_dollars,
    legend_entry,
    new_figure,
    series_style,
    set_log_y_scale,
    style_axis,
)
from diffquant.reports.tables import Table
from diffquant.support.files import read_text_or_xz
from diffquant.support.outputs import RunFiles
from diffquant.support.plain_data import parse_json

RANKS = (1, 2, 3, 10, 100)
LOGITS, HIDDEN = "logits", "hidden"


@dataclass(frozen=True)
class MagnitudeStatistics:
    """Statistics of the magnitudes of one kind of activation, attention logits or hidden states.

    Attributes:
        count: number of magnitudes.
        top: exact largest magnitudes by rank (1 is the largest), for the `RANKS` up to `count`.
        median: median, with a relative error of at most `calib.calibration.observers.QUANTILE_ERROR`.
    """

    count: int
    top: dict[int, float]
    median: float


@dataclass(frozen=True)
class ModelOutliers:
    """Statistics of one model's activations; the dictionaries have the keys "logits" and "hidden".

    Attributes:
        name: name of the checkpoint's folder or file.
        generation: "DIFF V1", "DIFF V2" or "Transformer".
        fingerprint: fingerprint of the checkpoint.
        tokens: number of tokens read.
        layers: statistics of each layer; without "logits" if the layer has no attention.
        overall: statistics over all layers together.
    """

    name: str
    generation: str
    fingerprint: str
    tokens: int
    layers: list[dict[str, MagnitudeStatistics]]
    overall: dict[str, MagnitudeStatistics]


@dataclass(frozen=True)
class Outliers:
    """Result of `find_outliers`: statistics of several models' activations on one text.

    Attributes:
        models: results of the models, in the given order.
        settings: text, window, dtype and versions of the run.
    """

    models: list[ModelOutliers]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """Return the results as a JSON document."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_outliers(file: Path) -> Outliers:
    """Read results from an outliers.json file."""
    data = parse_json(read_text_or_xz(file))
    models = [
        ModelOutliers(
            **model
            | {"layers": [_magnitudes(layer) for layer in model["layers"]], "overall": _magnitudes(model["overall"])}
        )
        for model in data["models"]
    ]
    return Outliers(models, data["settings"])


def _magnitudes(by_kind: dict[str, Any]) -> dict[str, MagnitudeStatistics]:
    return {
        kind: MagnitudeStatistics(
            each["count"], {int(rank): value for rank, value in each["top"].items()}, each["median"]
        )
        for kind, each in by_kind.items()
    }


TITLES = {LOGITS: "attention logits, |q·k|/√d", HIDDEN: "hidden states, |layer output|"}
# Plotted statistics of each layer: the largest magnitude, the hundredth largest, the median.
STATISTICS = ("top 1", "top 100", "median")


def outlier_table(outliers: Outliers) -> str:
    """Return a text table with each model's magnitudes over all layers, like Table 5 of arXiv 2410.05258."""
    lines = [[name if kind == LOGITS else "", kind, *rest] for name, kind, *rest in _lines(outliers)]
    return "\n".join([*Table(_HEADS, lines, names=2).text_lines(), "", _note(outliers)])


def outlier_report(outliers: Outliers, name: str, files: Sequence[str]) -> Report:
    """Return the HTML report of outliers.

    Args:
        name: name of the run.
        files: names of files in the same folder to link to.
    """
    keys = [legend_entry(number, text) for number, text in enumerate(STATISTICS)]
    sections = [
        Section(TITLES[kind].capitalize(), [Charts(_drawings(outliers, kind), keys)]) for kind in (LOGITS, HIDDEN)
    ]
    sections.append(Section("All layers", [Table(_HEADS, _lines(outliers), names=2), _note(outliers)]))
    plain = {name: value for name, value in outliers.settings.items() if not isinstance(value, dict)}
    sections.append(Section("Settings", [format_settings(plain)]))
    return Report("outliers", name, _headline(outliers), outliers.settings.get("date", ""), sections, files)


def _headline(outliers: Outliers) -> list[str]:
    sentences = []
    for kind, noun in ((LOGITS, "attention logit"), (HIDDEN, "hidden state")):
        largest = max(outliers.models, key=lambda model: model.overall[kind].top[1])
        magnitude = largest.overall[kind]
        ratio = f", {magnitude.top[1] / magnitude.median:,.0f} times its median" if magnitude.median else ""
        sentences.append(f"The largest {noun} is {_number(magnitude.top[1])} in {largest.name}{ratio}.")
    return sentences


def _drawings(outliers: Outliers, kind: str) -> list[Drawing]:
    """Return a drawing for each model, all with the same scale."""
    magnitudes = [layer[kind] for model in outliers.models for layer in model.layers if kind in layer]
    shown = [value for each in magnitudes for name in STATISTICS if (value := _statistic(each, name)) > 0]

    def draw(model: ModelOutliers, axis: Any, tips: Tips) -> None:
        draw_model(axis, model, kind, tips)
        axis.set_ylim(0.8 * min(shown), 1.25 * max(shown))
        set_log_y_scale(axis)
        axis.set_xlabel("layer")
        axis.set_ylabel("magnitude")

    return [
        draw_panel((4.4, 3.0), partial(draw, model), f"{model.name}: {TITLES[kind]} by layer", model.name)
        for model in outliers.models
    ]


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
    """Write outliers.json, outliers.png and outliers.html into a folder, and return their paths.

    Call `FILES.check(folder)` first, so that only files of an earlier run are replaced.
    """
    texts, pictures = {"outliers.json": outliers.to_json()}, {"outliers.png": partial(plot_outliers, outliers)}
    return write_run(folder, texts, pictures, "outliers.html", partial(outlier_report, outliers))


def plot_outliers(outliers: Outliers, path: Path) -> None:
    """Plot each layer's largest, 100th largest and median magnitude, and save the figure.

    The figure has a row of panels for each kind of activation, with a common scale, and a column for each model.

    Args:
        path: file to write; its suffix selects the format.
    """
    figure = new_figure(1.0 + max(2.9 * len(outliers.models), 5.0), 5.6)
    panels = figure.subplots(2, len(outliers.models), squeeze=False, sharex="col", sharey="row")
    for row, kind in zip(panels, (LOGITS, HIDDEN), strict=True):
        for axis, model in zip(row, outliers.models, strict=True):
            draw_model(axis, model, kind)
            axis.set_title(escape_dollars(model.name) if kind == LOGITS else "", fontsize=10)
            axis.set_xlabel("layer" if kind == HIDDEN else "")
        set_log_y_scale(row[0])
        row[0].set_ylabel(TITLES[kind])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(STATISTICS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def draw_model(axis: Any, model: ModelOutliers, kind: str, tips: Tips | None = None) -> None:
    """Plot one model's largest, 100th largest and median magnitude by layer.

    Args:
        axis: matplotlib axes to draw into.
        kind: kind of activation, "logits" or "hidden".
        tips: tooltips of the figure, to which those of the points are added, or None if it has no tooltips.
    """
    from matplotlib.ticker import MaxNLocator

    layers = [number for number, layer in enumerate(model.layers) if kind in layer]
    for number, name in enumerate(STATISTICS):
        values = [_statistic(model.layers[layer][kind], name) for layer in layers]
        axis.plot(layers, values, markersize=4, linewidth=1.3, label=name, **series_style(number))
        for layer, value in zip(layers, values, strict=True):
            add_tooltip(axis, tips, layer, value, f"layer {layer}, {name}: {_number(value)}")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    style_axis(axis)


def _statistic(magnitude: MagnitudeStatistics, name: str) -> float:
    return magnitude.median if name == "median" else magnitude.top.get(int(name.split()[1]), float("nan"))


def _cells(magnitude: MagnitudeStatistics) -> list[str]:
    top = [_number(magnitude.top[rank]) if rank in magnitude.top else "-" for rank in RANKS]
    ratio = f"{magnitude.top[1] / magnitude.median:,.0f}" if magnitude.median else "-"
    return [*top, _number(magnitude.median), ratio, f"{magnitude.count:,}"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"
