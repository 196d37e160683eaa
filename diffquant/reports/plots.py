"""Figures, axes and line styles that all plots share, and their conversion to SVG for a page."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple

from diffquant.reports.page import Drawing, Key

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
# Colours that a page replaces to match its dark or light scheme; all other colours stay as drawn.
_THEMED = {"#000000": "currentColor", "#ffffff": "var(--paper)", GRID: "var(--grid)", REFERENCE: "var(--muted)"}


# Colour, marker and line style of a series, as keyword arguments of matplotlib.
Look = dict[str, Any]


def series_style(number: int) -> Look:
    """Return a series' colour, marker and line style, as keyword arguments of matplotlib.

    Args:
        number: number of the series; series 0 to 139 all look different.
    """
    looks = {"color": COLOURS, "linestyle": STYLES, "marker": MARKERS}
    return {name: values[number % len(values)] for name, values in looks.items()}


def legend_entry(number: int, text: str) -> Key:
    """Return the legend entry of series `number`: its colour, a character shaped like its marker, and the text."""
    style = series_style(number)
    colour = "currentColor" if style["color"] == "#000000" else style["color"]
    return colour, GLYPHS[style["marker"]], text


class IntervalPoint(NamedTuple):
    """A point of a series, with an interval around its value.

    Attributes:
        x: position on the x axis.
        y: value.
        low: lower end of the value's interval.
        high: upper end of the value's interval.
        tip: text of the tooltip.
    """

    x: float
    y: float
    low: float
    high: float
    tip: str = ""


@dataclass(frozen=True)
class PlotLine:
    """A line of a panel.

    Attributes:
        model: name of the model, or of the granularity in a sweep of one model.
        points: points, in the order in which the line connects them.
        scheme: scheme of the line, such as its bit width; empty if the points' x is the bit width.
        full: point at 16 bits, or None if values are differences from the value at 16 bits.
    """

    model: str
    points: tuple[IntervalPoint, ...]
    scheme: str = ""
    full: IntervalPoint | None = None


# Texts of tooltips for the points of a drawing on a page, in the order of their marks.
Tips = list[str]


def add_tooltip(axis: Any, tips: Tips | None, x: float, y: float, text: str) -> None:
    """Add a tooltip to a point, with an invisible marker that is large enough for the pointer to hit.

    Args:
        tips: list of the drawing's tooltips, to which `text` is appended; if None, nothing happens.
    """
    if tips is not None:
        axis.plot([x], [y], "o", markersize=13, color="none", zorder=9, gid=f"tip-{len(tips)}")
        tips.append(text)


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
    """Return a matplotlib figure whose parts do not overlap; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def escape_dollars(name: str) -> str:
    """Escape dollar signs, so that matplotlib does not render the text between them as math."""
    return name.replace("$", r"\$")


def set_log_y_scale(axis: Any) -> None:
    """Make the y axis logarithmic, with decimal tick labels such as 0.01.

    Ticks are at powers of 10. If the axis spans a factor of less than 500, ticks are also at 2 and 5 times these
    powers.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 500 else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def as_svg(figure: Any, name: str, tips: Sequence[str] = ()) -> str:
    """Return a figure as one <svg> element, which loads nothing from outside.

    Text is stored as text, not as outlines. Black, white and greys follow the page's dark or light scheme.

    Args:
        name: description of the drawing, for screen readers.
        tips: texts of the tooltips, in the order in which `add_tooltip` added them.
    """
    import matplotlib

    buffer = io.StringIO()
    # A fixed salt makes equal drawings equal texts.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub("|".join(_THEMED), lambda found: _THEMED[found[0]], text[text.index("<svg") :])
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    for number, tip in enumerate(tips):
        titled = f'<g class="tip" tabindex="0"><title>{escape(tip)}</title>'
        text = text.replace(f'<g id="tip-{number}">', titled, 1)
    # Remove ids that nothing refers to, since several drawings are in one document.
    return re.sub(r'<g id="[a-z]+[a-z0-9_.]*">', "<g>", text)


def draw_panel(size: tuple[float, float], draw: Callable[[Any, Tips], object], name: str, title: str = "") -> Drawing:
    """Draw one plot, and return it as a drawing for a page.

    Args:
        size: width and height in inches.
        draw: function that draws into the axis that it gets, and appends tooltips to the list that it gets.
        name: description of the drawing, for screen readers.
        title: title above the drawing.
    """
    figure, tips = new_figure(*size), list[str]()
    draw(figure.subplots(), tips)
    return title, as_svg(figure, name, tips)


def draw_intervals(axis: Any, points: Sequence[IntervalPoint], number: int, tips: Tips | None = None) -> Any:
    """Draw points with error bars, and return matplotlib's container of them.

    Args:
        number: number of the series, which determines the colour and the marker.
        tips: list to which the points' tooltips are appended; if None, there are no tooltips.
    """
    places, heights = [point.x for point in points], [point.y for point in points]
    bars = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
    drawn = axis.errorbar(
        places, heights, bars, markersize=5, linewidth=1.4, elinewidth=1, capsize=2.5, **series_style(number)
    )
    for point in points:
        add_tooltip(axis, tips, point.x, point.y, point.tip)
    return drawn


def style_axis(axis: Any, grid: Literal["x", "y", "both"] = "y") -> None:
    """Give an axis a pale grid behind its content, and remove its top and right borders."""
    axis.grid(axis=grid, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
