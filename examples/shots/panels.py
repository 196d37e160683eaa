"""Plots with a panel per target, and in each a line per model and bit width."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from diffquant.reports.plots import Look, PlotLine, escape_dollars, new_figure, series_style, style_axis


def panels(lines: Iterable[tuple[str | None, PlotLine]]) -> dict[str, list[PlotLine]]:
    """Group lines by the title of their panel; lines with title None, at 16 bits, are in every panel."""
    full: list[PlotLine] = []
    narrow: dict[str, list[PlotLine]] = {}
    for title, line in lines:
        (full if title is None else narrow.setdefault(title, [])).append(line)
    return {title: full + found for title, found in narrow.items()} or ({"16 bits": full} if full else {})


def draw_panels(
    shown: Mapping[str, list[PlotLine]],
    draw: Callable[[Any, PlotLine, str, Look], None],
    finish: Callable[[Any, list[PlotLine]], None],
    label: str,
    path: Path,
) -> None:
    """Draw panels into a file, whose suffix determines the format.

    Args:
        shown: lines by the title of their panel.
        draw: function that draws a line into an axis, given its legend text and its look: colour by model, style by
            scheme.
        finish: function that scales and labels the horizontal axis of a panel.
        label: label of the vertical axis, which all panels share.
    """
    models = list(dict.fromkeys(line.model for lines in shown.values() for line in lines))
    figure = new_figure(2.4 + 4.4 * len(shown), 4.6)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, shown.items(), strict=True):
        schemes = list(dict.fromkeys(line.scheme for line in lines))
        for line in lines:
            style = series_style(schemes.index(line.scheme))
            style["color"] = series_style(models.index(line.model))["color"]
            draw(axis, line, escape_dollars(f"{line.model}, {line.scheme}"), style)
        finish(axis, lines)
        axis.set_title(title, fontsize=11)
        axis.legend(fontsize=8, frameon=False)
        style_axis(axis)
    axes[0].set_ylabel(label)
    figure.savefig(path, dpi=200)
