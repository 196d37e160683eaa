"""Picture of E6: the ratio of the logits' ranges against tokens, and where DIFF would break even."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from matplotlib.ticker import FormatStrFormatter, LogLocator

from diffquant.reports.plots import REFERENCE, new_figure, series_style, style_axis
from research.figure8.comparisons import LONGER, MAIN, break_even
from research.figure8.growth import USUAL, at_step, r_by, scored
from research.figure8.plan import TOKENS_PER_STEP, Result
from research.figure8.plot import NAMES


def plot_growth(there: Mapping[str, Result]) -> Any:
    """Figure of r by layer over millions of tokens: trainings thin, their mean thick, E2's ends, break-even dashed.

    The Transformer itself is the line at 1.
    """
    figure = new_figure(6.4, 4.4)
    axis = figure.subplots()
    steps = [step for step in there[USUAL[0].names[0][0]]["range_by_step"] if step != "0"]
    tokens = [int(step) * TOKENS_PER_STEP / 1e6 for step in steps]
    for number, (usual, longer, main) in enumerate(zip(USUAL, LONGER, MAIN, strict=True)):
        # The Transformer has the first colour on every other picture.
        style = series_style(number + 1)
        paths = [[2**value for value in usual.values(there, r_by(at_step(step)))] for step in steps]
        for path in zip(*paths, strict=True):
            axis.plot(tokens, path, color=style["color"], linewidth=0.7, alpha=0.5)
        mean = [fmean(values) for values in paths]
        axis.plot(tokens, mean, **style, markersize=4, label=NAMES[usual.kind])
        ends = [2**value for value in longer.values(there, r_by(scored))]
        ended = [there[longer.names[0][0]]["tokens"] / 1e6] * len(ends)
        axis.scatter(ended, ends, s=18, facecolors="none", edgecolors=style["color"])
        level = 2 ** fmean(main.values(there, break_even))
        axis.axhline(level, color=style["color"], linewidth=1, linestyle="--")
        axis.annotate(
            f"{NAMES[usual.kind]} breaks even",
            (tokens[0], level),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axis.axhline(1, color=REFERENCE, linewidth=1, label="Transformer")
    axis.set_xscale("log")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_locator(LogLocator(2, [1, 1.25, 1.5, 1.75]))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_xlabel("million tokens (circles: the ends of E2)")
    axis.set_ylabel("r by layer: largest logits, Transformer's over DIFF's")
    style_axis(axis, "both")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure
