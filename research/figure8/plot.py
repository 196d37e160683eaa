"""Pictures of the trainings: bits won at 4 bits, and bits won by the ratio of the logits' ranges."""

from collections.abc import Mapping
from typing import Any

from diffquant.measure.stats import mean_interval
from diffquant.reports.plots import REFERENCE, new_figure, series_style, style_axis
from research.figure8.comparisons import LARGER, LONGER, MAIN, PAPER_RATIO, RATIOS, bits_won, won_at_ratio
from research.figure8.plan import Result
from research.figure8.scoring import SHARED

_BITS = 4
NAMES = {"diff-v1": "DIFF V1", "diff-v2": "DIFF V2"}
# Heights of a kind's dots and of its interval, from a granularity's line.
_APART, _ABOVE = 0.36, 0.13
_SIZES = {
    "1.25 million parameters": MAIN,
    "1.25 million, three times the tokens": LONGER,
    "5.3 million parameters": LARGER,
}


def plot_bits_won(there: Mapping[str, Result]) -> Any:
    """Figure with a line for each granularity and a colour for each kind; intervals are over trainings."""
    figure = new_figure(6.4, 5.2)
    axis = figure.subplots()
    for number, comparison in enumerate(MAIN):
        # The Transformer has the first colour on every other picture.
        style = series_style(number + 1)
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
                label=None if line else NAMES[comparison.kind],
            )
    axis.axvline(0, color=REFERENCE, linewidth=1)
    axis.set_yticks(range(len(SHARED)), [f"{_BITS}:{shared}" for shared in SHARED])
    axis.invert_yaxis()
    axis.set_xlabel("bits won over the Transformer of the same seed (left of 0: DIFF loses)")
    style_axis(axis, "x")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def plot_by_ratio(there: Mapping[str, Result]) -> Any:
    """Figure with a panel for each DIFF kind and a line for each size, over the ratio of the logits' ranges."""
    figure = new_figure(7.6, 4.4)
    axes = figure.subplots(1, len(MAIN), sharey=True)
    for panel, axis in enumerate(axes):
        for number, (size, comparisons) in enumerate(_SIZES.items()):
            comparison = comparisons[panel]
            means = [mean_interval(comparison.values(there, won_at_ratio(ratio))) for ratio in RATIOS]
            axis.errorbar(
                # Side by side, since the intervals of the sizes overlap.
                [ratio * 1.05 ** (number - 1) for ratio in RATIOS],
                [mean.mean for mean in means],
                yerr=[[mean.mean - mean.low for mean in means], [mean.high - mean.mean for mean in means]],
                **series_style(number),
                markersize=5,
                capsize=3,
                label=None if panel else size,
            )
        axis.axhline(0, color=REFERENCE, linewidth=1)
        axis.axvline(PAPER_RATIO, color=REFERENCE, linewidth=1, linestyle="--")
        axis.annotate(
            f"{PAPER_RATIO:.1f} in the\npaper's Table 5",
            (PAPER_RATIO, -1),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
        axis.set_title(NAMES[comparisons[panel].kind])
        style_axis(axis, "both")
    axes[0].set_ylabel("bits won by DIFF (below 0: DIFF loses)")
    figure.supxlabel("range of the Transformer's logits over DIFF's", fontsize="medium")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure
