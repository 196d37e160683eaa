"""Plots with a line for each model and width, side by side in a panel for each target."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.report.plots import Look, literal, look, new_figure, tidy


@dataclass(frozen=True)
class Line:
    """One model at one width: its points from left to right, each a place and what is drawn there."""

    model: str
    scheme: str
    points: tuple[tuple[float, ...], ...]


def panels(lines: Iterable[tuple[str | None, Line]]) -> dict[str, list[Line]]:
    """The lines of each panel by its title; those without one, at 16 bits, stand in every panel."""
    full: list[Line] = []
    narrow: dict[str, list[Line]] = {}
    for title, line in lines:
        (full if title is None else narrow.setdefault(title, [])).append(line)
    return {title: full + found for title, found in narrow.items()} or ({"16 bits": full} if full else {})


def draw_panels(
    shown: Mapping[str, list[Line]],
    draw: Callable[[Any, Line, str, Look], None],
    finish: Callable[[Any, list[Line]], None],
    label: str,
    path: Path,
) -> None:
    """Draw panels into a file, whose suffix says the format.

    Args:
        draw: function that draws a line into an axis under its name, in a colour of its model and a style of its width.
        finish: function that scales and names the horizontal axis of a panel.
        label: text of the vertical axis, which all share.
    """
    models = list(dict.fromkeys(line.model for lines in shown.values() for line in lines))
    figure = new_figure(2.4 + 4.4 * len(shown), 4.6)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (title, lines) in zip(axes, shown.items(), strict=True):
        schemes = list(dict.fromkeys(line.scheme for line in lines))
        for line in lines:
            style = look(schemes.index(line.scheme))
            style["color"] = look(models.index(line.model))["color"]
            draw(axis, line, literal(f"{line.model}, {line.scheme}"), style)
        finish(axis, lines)
        axis.set_title(title, fontsize=11)
        axis.legend(fontsize=8, frameon=False)
        tidy(axis)
    axes[0].set_ylabel(label)
    figure.savefig(path, dpi=200)
