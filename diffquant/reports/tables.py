"""Formats tables as aligned text for terminals, as Markdown, HTML or CSV, and formats sizes as text.

Bits per weight are always all stored bits, scales included, divided by the number of weights.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar
from urllib.parse import quote

from diffquant.support.terminal import one_line

# Tables with more rows get a text field that filters them.
_FEW_ROWS = 12


@dataclass(frozen=True)
class Link:
    """A text that links to a file.

    Attributes:
        path: path of the file relative to the page's folder, with forward slashes.
    """

    text: str
    path: str

    @property
    def address(self) -> str:
        """The path as a URL; it starts with "." or "/", so that it cannot be read as a web address."""
        return quote(self.path if self.path.startswith((".", "/")) else f"./{self.path}")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Table:
    """A table of texts, for a page, a terminal or a document.

    On a page, a click on a heading sorts the table.

    Attributes:
        heads: headings of the columns.
        rows: texts or links of each table row, one per column.
        shaded: whether each row is shaded as a baseline; if empty, no row is.
        names: number of leading columns with names, aligned left; the columns after them have numbers, aligned right.
        prose: number of trailing columns with sentences, which may wrap on a page.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    shaded: Sequence[bool] = ()
    names: int = 1
    prose: int = 0
    kind: ClassVar[str] = "table"

    @property
    def is_filtered(self) -> bool:
        """Whether the page has a text field that filters the rows."""
        return len(self.rows) > _FEW_ROWS

    def is_shaded(self, row: int) -> bool:
        return bool(self.shaded) and self.shaded[row]

    def text_lines(self) -> list[str]:
        """Return the table as lines of text with aligned columns, for a terminal."""
        return align_columns(self.heads, self._texts, self.names)

    def markdown(self) -> list[str]:
        """Return the table as lines of Markdown, for a document."""
        return markdown(self.heads, self._texts)

    def html(self) -> str:
        """Return the table as plain HTML, for a notebook."""
        rows = [("th", [*self.heads]), *(("td", texts) for texts in self._texts)]
        lines = ("".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) for kind, texts in rows)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    @property
    def _texts(self) -> list[list[str]]:
        return [[*map(str, row)] for row in self.rows]


def align_columns(head: Sequence[str], lines: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """Return the head, a rule and the rows as lines of text with aligned columns.

    Line breaks inside a text become spaces.

    Args:
        head: headings of the columns.
        lines: texts of each row.
        names: number of leading columns with names, aligned left; the columns after them have numbers, aligned right.
    """
    head, *lines = ([one_line(text) for text in texts] for texts in (head, *lines))
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    first, *rest = (_line(texts, widths, names) for texts in (head, *lines))
    return [first, rule, *rest]


def _line(texts: Sequence[str], widths: Sequence[int], names: int) -> str:
    return "  ".join(
        text.ljust(width) if column < names else text.rjust(width)
        for column, (text, width) in enumerate(zip(texts, widths, strict=True))
    ).rstrip()


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the head, a rule and the rows as lines of a Markdown table; texts may contain Markdown."""
    rows = ([one_line(text) for text in texts] for texts in (head, ["---"] * len(head), *lines))
    return [f"| {' | '.join(texts)} |" for texts in rows]


def format_csv(records: Sequence[Mapping[str, object]]) -> str:
    """Return records as CSV, with a column for every name that a record has.

    Numbers have all their digits. A text that a spreadsheet would evaluate gets an apostrophe before it.
    """
    heads = list(dict.fromkeys(name for record in records for name in record))
    rows: list[list[object]] = [[*heads], *([_as_text(record.get(name, "")) for name in heads] for record in records)]
    return "".join(f"{_csv_line(row)}\n" for row in rows)


def _csv_line(values: Sequence[object]) -> str:
    """Write values as a line of CSV, without the line end; values that contain line ends are quoted."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow(values)
    return out.getvalue().removesuffix("\r\n")


def _as_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = one_line(value)
    return f"'{shown}" if shown.startswith(tuple("=+-@ ")) else shown


def format_size(size: float) -> str:
    """Format a number of bytes in MB, or in GB from 1 GB on; 1 MB is 10^6 bytes."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


# If a source's size is within this fraction of 16 bits per weight, sizes are not also compared with 16 bits.
_ALIKE = 0.01


def stored_bits_per_weight(nbytes: float, weights: int) -> float:
    """Return the stored bits per weight.

    Args:
        nbytes: stored bytes of the weights, scales included.
        weights: number of weights.
    """
    return 8 * nbytes / max(1, weights)


def bytes_at_16_bits(weights: int) -> int:
    """Return the number of bytes that `weights` weights take at 16 bits each."""
    return 2 * weights


def compare_size(nbytes: int, source_bytes: int, weights: int) -> str:
    """Return a text with a size and its share of the source's size.

    If the source does not have 16 bits per weight, the text also has the share of the size at 16 bits.

    Args:
        nbytes: bytes that were or would be written.
        source_bytes: bytes of the source.
        weights: number of weights of the source.
    """
    full = bytes_at_16_bits(weights)
    compared = f"{format_size(nbytes)}, {_share(nbytes, source_bytes)} of the source's {format_size(source_bytes)}"
    if abs(source_bytes / max(1, full) - 1) < _ALIKE:
        return compared
    return f"{compared} and {_share(nbytes, full)} of 16 bits' {format_size(full)}"


def _share(part: int, whole: int) -> str:
    return f"{part / max(1, whole):.1%}"
