"""The picture of the primary trainings: bits won at 4 bits, a dot a training."""

from collections.abc import Mapping
from typing import Any

from diffquant.evals.stats import mean_interval
from diffquant.report.plots import REFERENCE, look, new_figure, tidy
from research.figure8.analysis import MAIN, bits_won
from research.figure8.plan import Result
from research.figure8.scoring import SHARED

_BITS = 4
_NAMES = {"diff-v1": "DIFF V1", "diff-v2": "DIFF V2"}
# Heights of a kind's dots and of its interval, from a granularity's line.
_APART, _ABOVE = 0.36, 0.13


def plot_bits_won(there: Mapping[str, Result]) -> Any:
    """Figure with a line for each granularity and a colour for each kind; intervals are over trainings."""
    figure = new_figure(6.4, 5.2)
    axis = figure.subplots()
    for number, comparison in enumerate(MAIN):
        # The Transformer has the first colour on every other picture.
        style = look(number + 1)
        for line, shared in enumerate(SHARED):
            won = comparison.values(there, bits_won(f"{_BITS}:{shared}"))
            height = line + _APART * (number - 0.5)
            axis.scatter(won, [height - _ABOVE] * len(won), s=14, facecolors="none", edgecolors=style["color"])
            mean = mean_interval(won)
            axis.errorbar(
                [mean.mean],
                [height],
                xerr=[[mean.mean - mean.low], [mean.high - mean.mean]],
                color=style["color"],
                marker=style["marker"],
                markersize=5,
                capsize=3,
                label=None if line else _NAMES[comparison.kind],
            )
    axis.axvline(0, color=REFERENCE, linewidth=1)
    axis.set_yticks(range(len(SHARED)), [f"{_BITS}:{shared}" for shared in SHARED])
    axis.invert_yaxis()
    axis.set_xlabel("bits won over the Transformer of the same seed (left of 0: DIFF loses)")
    tidy(axis, "x")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure
