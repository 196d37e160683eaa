"""Plots of KL against bits by granularity, and of measured KL against predicted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffquant.evals.stats import estimate
from diffquant.report.plots import COLOURS, MARKERS, new_figure, tidy

_COLUMNS = 3


def write_plots(results: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write kl.png and prediction.png into a folder."""
    plot_by_bits(results).savefig(folder / "kl.png", dpi=150)
    plot_against_prediction(results).savefig(folder / "prediction.png", dpi=150)


def plot_by_bits(results: Sequence[Mapping[str, Any]]) -> Any:
    """Figure with a panel for each granularity and a line for each model; bars are 95 % intervals over sequences."""
    granularities = list(dict.fromkeys(scheme.split(":", 1)[1] for scheme in results[0]["kl"]))
    rows = -(-len(granularities) // _COLUMNS)
    figure = new_figure(3.4 * _COLUMNS, 0.6 + 2.6 * rows)
    axes = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axis, granularity in zip(axes.flat, granularities, strict=False):
        for number, result in enumerate(results):
            _line(axis, result, granularity, number)
        axis.set_yscale("log")
        axis.invert_xaxis()
        axis.set_title(granularity, fontsize=10)
        tidy(axis, "both")
    for axis in axes.flat[len(granularities) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("bits of logits")
    for row in axes:
        row[0].set_ylabel("KL from 16 bits, nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_against_prediction(results: Sequence[Mapping[str, Any]]) -> Any:
    """Figure with a point for each scheme of every model."""
    from studies.figure8 import predicted

    figure = new_figure(5.4, 5.0)
    axis = figure.subplots()
    drawn: list[float] = []
    for number, result in enumerate(results):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        for shift in (False, True):
            schemes = [scheme for scheme in result["kl"] if scheme.endswith(":shift") == shift]
            if not schemes:
                continue
            guesses = [predicted(result, scheme) for scheme in schemes]
            measured = [estimate(result["kl"][scheme]).mean for scheme in schemes]
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
    axis.plot([min(drawn), max(drawn)], [min(drawn), max(drawn)], color="#888888", linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("predicted KL, nats")
    axis.set_ylabel("measured KL, nats")
    axis.legend(frameon=False, fontsize=9)
    tidy(axis, "both")
    return figure


def _line(axis: Any, result: Mapping[str, Any], granularity: str, number: int) -> None:
    schemes = [scheme for scheme in result["kl"] if scheme.split(":", 1)[1] == granularity]
    kl = [estimate(result["kl"][scheme]) for scheme in schemes]
    axis.errorbar(
        [int(scheme.split(":")[0]) for scheme in schemes],
        [estimated.mean for estimated in kl],
        yerr=[1.96 * (estimated.se or 0.0) for estimated in kl],
        label=result["model"],
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        capsize=2,
    )
