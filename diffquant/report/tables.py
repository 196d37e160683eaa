"""Tables in plain text: in aligned columns for terminals, in Markdown for documents, as CSV for spreadsheets."""

import csv
import io
from collections.abc import Mapping, Sequence

from diffquant.support.escaping import one_line


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """The head, a rule and the lines, in columns as wide as their longest text; a text takes one line.

    Args:
        names: number of first columns that hold names, set to the left; the others hold numbers, to the right.
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
    """The head, a rule and the lines as a Markdown table, whose cells may hold Markdown."""
    rows = ([one_line(text) for text in texts] for texts in (head, ["---"] * len(head), *lines))
    return [f"| {' | '.join(texts)} |" for texts in rows]


def csv_text(records: Sequence[Mapping[str, object]]) -> str:
    """Records as CSV with a head, numbers in full; a text that a spreadsheet would compute follows an apostrophe."""
    heads = list(dict.fromkeys(name for record in records for name in record))
    rows: list[list[object]] = [[*heads], *([_as_text(record.get(name, "")) for name in heads] for record in records)]
    return "".join(f"{_csv_line(row)}\n" for row in rows)


def _csv_line(values: Sequence[object]) -> str:
    """Values as a line of CSV, without its end; the writer quotes the characters that it ends lines with."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow(values)
    return out.getvalue().removesuffix("\r\n")


def _as_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = one_line(value)
    return f"'{shown}" if shown.startswith(tuple("=+-@ ")) else shown


def megabytes(size: float) -> str:
    """A number of bytes as text, in MB or from 1 GB on in GB (powers of ten)."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
