"""A sweep's result as Python gets it: its table, and its picture."""

from html import escape
from io import BytesIO
from pathlib import Path

from diffquant.report.plots import Picture
from diffquant.sweep.plot import plot
from diffquant.sweep.result import SweepResult
from diffquant.sweep.table import cells_of, notes, text_table


class MeasuredSweep(SweepResult):
    """All cells of a sweep, to print, to draw, and to end a notebook's cell with."""

    def table(self) -> str:
        """The table with its notes, as the command prints it."""
        return text_table(self)

    def plot(self, path: Path | str | None = None) -> Picture:
        """The plot of changes and scores against bits, which a notebook shows.

        Args:
            path: file to draw into as well, whose suffix (.png, .svg, .pdf) says the format.

        Raises:
            UsageError: there is nothing to draw.
        """
        drawn = BytesIO()
        plot(self, drawn)
        if path is not None:
            plot(self, Path(path))
        return Picture(drawn.getvalue())

    def __str__(self) -> str:
        return self.table() if self.cells else repr(self)

    def _repr_html_(self) -> str:
        heads, lines = cells_of(self)
        rows = [_row("th", heads), *(_row("td", line) for line in lines)]
        return f"<table>{''.join(rows)}</table>" + "".join(f"<p>{escape(note)}</p>" for note in notes(self))


def _row(kind: str, texts: list[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) + "</tr>"
