"""Figures, axes and looks that all plots share, and their form on a page."""

import io
import re
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypedDict

from diffquant.report.page import Key

# Okabe and Ito's colours, which people with any common colour blindness can tell apart, and three of Paul Tol's.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#AA4499",
    "#999933",
    "#88857F",
)
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Marks of the same shapes as text, for a legend on a page.
GLYPHS = dict(zip(MARKERS, "●■▲◆▼✚✖", strict=True))

GRID, REFERENCE = "#dddddd", "#888888"
# What a page colours by its scheme, dark or light; all other colours stay as they are drawn.
_THEMED = {"#000000": "currentColor", "#ffffff": "var(--paper)", GRID: "var(--grid)", REFERENCE: "var(--muted)"}


class Look(TypedDict):
    """Colour, marker and line of a series, as keyword arguments of matplotlib."""

    color: str
    linestyle: str
    marker: str


def look(number: int) -> Look:
    """Look of a series by its number; no two of the first 140 are alike."""
    return Look(
        color=COLOURS[number % len(COLOURS)],
        linestyle=STYLES[number % len(STYLES)],
        marker=MARKERS[number % len(MARKERS)],
    )


def key_of(number: int, text: str) -> Key:
    """A legend's entry for the series of that number."""
    style = look(number)
    return Key("currentColor" if style["color"] == "#000000" else style["color"], GLYPHS[style["marker"]], text)


class Tips:
    """Texts that a page shows where the pointer rests on a point of a drawing."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, axis: Any, x: float, y: float, text: str) -> None:
        """Lay an unseen mark over a point, large enough to be hit."""
        axis.plot([x], [y], "o", markersize=13, color="none", zorder=9, gid=f"tip-{len(self.texts)}")
        self.texts.append(text)


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture that a notebook shows.

    Attributes:
        png: content of a PNG file.
    """

    png: bytes

    def __repr__(self) -> str:
        return "a picture"

    def _repr_png_(self) -> bytes:
        return self.png


def new_figure(width: float, height: float) -> Any:
    """A figure in inches whose parts make room for each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def literal(name: str) -> str:
    """A name as matplotlib draws it letter by letter, which takes what stands between dollars for mathematics."""
    return name.replace("$", r"\$")


def plain_log_scale(axis: Any) -> None:
    """Make a y axis logarithmic, its ticks written out in full and closer where it spans little."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 500 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def as_svg(figure: Any, name: str, tips: Tips | None = None) -> str:
    """The figure as one <svg> element that refers to nothing outside itself.

    Its letters are text and its black, white and greys are those of the page, dark or light.

    Args:
        name: what the drawing shows, for those who hear the page read.
        tips: texts of its points.
    """
    import matplotlib

    buffer = io.StringIO()
    # The salt makes the same drawing the same text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub("|".join(_THEMED), lambda found: _THEMED[found[0]], text[text.index("<svg") :])
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    for number, tip in enumerate(tips.texts if tips else ()):
        titled = f'<g class="tip" tabindex="0"><title>{escape(tip)}</title>'
        text = text.replace(f'<g id="tip-{number}">', titled, 1)
    # Several drawings stand in one document, where nothing refers to these.
    return re.sub(r'<g id="[a-z]+[a-z0-9_.]*">', "<g>", text)


def tidy(axis: Any, grid: Literal["x", "y", "both"] = "y") -> None:
    """Give an axis a pale grid behind what is drawn, open at the top and on the right."""
    axis.grid(axis=grid, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
