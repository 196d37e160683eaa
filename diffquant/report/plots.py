"""Figures, axes and colours that all plots share, and their form on a page."""

import io
from typing import Any, Literal


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


def as_svg(figure: Any) -> str:
    """The figure as one <svg> element that refers to nothing outside itself."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def tidy(axis: Any, grid: Literal["y", "both"] = "y") -> None:
    """Give an axis a pale grid behind what is drawn, open at the top and on the right."""
    axis.grid(axis=grid, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


# Okabe and Ito's colours, which people with any common colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
