"""Plots of KL against bits by granularity, and of measured KL against predicted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from diffquant.reports.plots import REFERENCE, new_figure, series_style, style_axis
from research.studies.figure8_model import mean_kl, predicted

_COLUMNS = 3
# Distance of two lines at one width; where the axis ends below the lowest point.
_SPREAD, _FLOOR = 0.06, 0.3
# KL that float32's own rounding makes, in nats: smaller ones, negative ones among them, mean nothing.
_NOISE = 1e-7


def write_plots(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write kl.png and prediction.png into a folder."""
    plot_by_bits(results).savefig(folder / "kl.png", dpi=150)
    plot_against_prediction(results).savefig(folder / "prediction.png", dpi=150)


def plot_by_bits(results: Sequence[Mapping[str, Any]]) -> Any:
    """Figure with a panel for each granularity and a line for each model.

    Of prose it shows means with 95 % intervals over passages, of needles medians and the middle half of contexts: a
    context or two make the mean there.
    """
    granularities = list(dict.fromkeys(scheme.split(":", 1)[1] for scheme in results[0]["kl"]))
    rows = -(-len(granularities) // _COLUMNS)
    figure = new_figure(3.4 * _COLUMNS, 0.6 + 2.6 * rows)
    axes = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axis, granularity in zip(axes.flat, granularities, strict=False):
        for number, result in enumerate(results):
            _line(axis, result, granularity, number)
        axis.set_yscale("log")
        widths = sorted({int(scheme.split(":")[0]) for scheme in results[0]["kl"]}, reverse=True)
        axis.set_xticks(range(len(widths)), [str(bits) for bits in widths])
        axis.set_title(granularity, fontsize=10)
        style_axis(axis, "both")
    for axis in axes.flat[len(granularities) :]:
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(granularities) - _COLUMNS) : len(granularities)]:
        axis.set_xlabel("bits of logits")
        axis.tick_params(labelbottom=True)
    for row in axes:
        row[0].set_ylabel("KL from 16 bits, nats")
    lowest = min(_middle(result, scheme)[0] for result in results for scheme in result["kl"])
    axes[0][0].set_ylim(bottom=max(_FLOOR * lowest, _NOISE))
    figure.suptitle(_bars_text(results[0]["reading"]), fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_against_prediction(results: Sequence[Mapping[str, Any]]) -> Any:
    """Figure with a point for each scheme of every model."""
    figure = new_figure(5.4, 5.0)
    axis = figure.subplots()
    drawn: list[float] = []
    for number, result in enumerate(results):
        colour, marker = series_style(number)["color"], series_style(number)["marker"]
        for shift in (False, True):
            schemes = [scheme for scheme in result["kl"] if scheme.endswith(":shift") == shift]
            if not schemes:
                continue
            guesses = [predicted(result, scheme) for scheme in schemes]
            measured = [mean_kl(result, scheme).mean for scheme in schemes]
            drawn += guesses + measured
            axis.scatter(
                guesses,
                measured,
                s=22,
                marker=marker,
                edgecolors=colour,
                facecolors="none" if shift else colour,
                label=f"{result['model']}, shift" if shift else result["model"],
            )
    axis.plot([min(drawn), max(drawn)], [min(drawn), max(drawn)], color=REFERENCE, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("predicted KL, nats")
    axis.set_ylabel("measured KL, nats")
    axis.legend(frameon=False, fontsize=9)
    style_axis(axis, "both")
    return figure


def _line(axis: Any, result: Mapping[str, Any], granularity: str, number: int) -> None:
    schemes = [scheme for scheme in result["kl"] if scheme.split(":", 1)[1] == granularity]
    widths = sorted({int(scheme.split(":")[0]) for scheme in result["kl"]}, reverse=True)
    middles = [_middle(result, scheme) for scheme in schemes]
    # Side by side, so that bars at one width stay readable.
    axis.errorbar(
        [widths.index(int(scheme.split(":")[0])) + _SPREAD * number for scheme in schemes],
        [middle for middle, _, _ in middles],
        yerr=[[middle - low for middle, low, _ in middles], [high - middle for middle, _, high in middles]],
        label=result["model"],
        markersize=4,
        linewidth=1.4,
        capsize=2,
        **series_style(number),
    )


def _bars_text(reading: Mapping[str, Any]) -> str:
    if "needles" in reading:
        return "median, middle half of contexts; the axis ends at float32's own noise"
    return f"mean, 95 % interval over {'passages' if 'passages' in reading else 'windows'}"


def _of_needles(result: Mapping[str, Any]) -> bool:
    return "needles" in result["reading"]


def _middle(result: Mapping[str, Any], scheme: str) -> tuple[float, float, float]:
    """KL of a scheme as it is drawn: its middle and both ends of the bar."""
    if _of_needles(result):
        low, middle, high = quantiles(result["kl"][scheme], n=4)
        return middle, low, high
    kl = mean_kl(result, scheme)
    return kl.mean, kl.low, kl.high
