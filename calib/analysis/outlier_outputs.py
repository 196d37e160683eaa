"""Outliers for people: a table of the models, a plot of their layers, the numbers as JSON."""

from pathlib import Path
from typing import Any

from diffquant.calib.analysis.outliers import HIDDEN, LOGITS, RANKS, Magnitude, ModelOutliers, Outliers
from diffquant.report.plots import COLOURS, literal, new_figure, plain_log_scale, tidy
from diffquant.report.tables import aligned
from diffquant.support.files import write_atomically

_TITLES = {LOGITS: "attention logits, |q·k|/√d", HIDDEN: "hidden states, |layer output|"}


def outlier_table(outliers: Outliers) -> str:
    """A table of every model over all its layers, like the paper's Table 5."""
    head = ["model", "activation", *(f"top {rank}" for rank in RANKS), "median", "top 1 / median", "values"]
    lines = [
        [model.name if kind == LOGITS else "", kind, *_cells(model.overall[kind])]
        for model in outliers.models
        for kind in (LOGITS, HIDDEN)
    ]
    tokens = ", ".join(dict.fromkeys(f"{model.tokens:,}" for model in outliers.models))
    note = (
        f"{tokens} tokens in windows of {outliers.settings['window']}; largest magnitudes are exact, "
        f"medians within {outliers.settings['median_error']:.1%}"
    )
    return "\n".join([*aligned(head, lines, names=2), "", note])


def write_outliers(outliers: Outliers, folder: Path) -> list[Path]:
    """Write outliers.json and outliers.png."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "outliers.json", folder / "outliers.png"
    write_atomically(data, outliers.to_json())
    plot_outliers(outliers, picture)
    return [data, picture]


def plot_outliers(outliers: Outliers, path: Path) -> None:
    """Draw the largest magnitude and the median of each layer, a panel for each kind; the suffix says the format."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(10.4, 4.6)
    panels = figure.subplots(1, 2)
    for axis, kind in zip(panels, (LOGITS, HIDDEN), strict=True):
        for number, model in enumerate(outliers.models):
            _draw(axis, model, kind, number)
        plain_log_scale(axis)
        axis.set_title(_TITLES[kind], fontsize=11)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        tidy(axis)
    panels[0].set_ylabel("magnitude")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(outliers.models), frameon=False, fontsize=9)
    figure.savefig(path, dpi=200)


def _draw(axis: Any, model: ModelOutliers, kind: str, number: int) -> None:
    layers = [number for number, layer in enumerate(model.layers) if kind in layer]
    colour = COLOURS[number % len(COLOURS)]
    # Where two models agree their lines coincide: later ones are thinner and leave the earlier visible.
    width = 3.4 / (1 + number)
    for name, style, marker in (("top 1", "-", "o"), ("top 100", ":", "^"), ("median", "--", "s")):
        values = [_statistic(model.layers[layer][kind], name) for layer in layers]
        axis.plot(
            layers,
            values,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=5 / (1 + 0.5 * number),
            linewidth=width,
            label=literal(f"{model.name}, {name}"),
        )


def _statistic(magnitude: Magnitude, name: str) -> float:
    return magnitude.median if name == "median" else magnitude.top.get(int(name.split()[1]), float("nan"))


def _cells(magnitude: Magnitude) -> list[str]:
    top = [_number(magnitude.top[rank]) if rank in magnitude.top else "-" for rank in RANKS]
    ratio = f"{magnitude.top[1] / magnitude.median:,.0f}" if magnitude.median else "-"
    return [*top, _number(magnitude.median), ratio, f"{magnitude.count:,}"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"
