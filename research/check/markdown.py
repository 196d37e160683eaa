"""A page of documentation as its parts: tables, transcripts and running text, each with its line numbers."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A row of a table: its cells' texts and the line that it stands on."""

    line: int
    cells: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.cells[0]


@dataclass(frozen=True)
class Table:
    """A table: the heading it stands under, the heads of its columns, its rows."""

    section: str
    line: int
    heads: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Call:
    """A command of a transcript, and the lines that it printed."""

    line: int
    command: str
    output: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A paragraph or list item on one line, and where each of its lines began.

    Attributes:
        text: the lines, joined by single spaces.
        starts: offset of each line in the text.
        first: number of the first line.
        section: the heading that it stands under.
    """

    text: str
    starts: tuple[int, ...]
    first: int
    section: str = ""

    def line_at(self, offset: int) -> int:
        return self.first + bisect_right(self.starts, offset) - 1


@dataclass
class Document:
    """A page's parts, in order.

    Attributes:
        cells: cells of tables that are to be read as running text; who declares the page chooses them.
    """

    name: str
    tables: list[Table] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    cells: list[Passage] = field(default_factory=list)


def read_document(file: Path, name: str) -> Document:
    """Parse a page."""
    document, section = Document(name), ""
    pending: list[tuple[int, str]] = []
    lines = file.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        is_break = not line.strip() or line.startswith(("#", "|", "```"))
        if pending and (is_break or re.match(r"\s*(?:[-*]|\d+\.) ", line)):
            document.passages.append(_passage(pending, section))
            pending = []
        if line.startswith("```"):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].startswith("```"))
            document.calls += _calls(lines[at + 1 : end], at + 2)
            at = end
        elif line.startswith("|"):
            end = next((n for n in range(at, len(lines)) if not lines[n].startswith("|")), len(lines))
            document.tables.append(_table(section, lines[at:end], at + 1))
            at = end - 1
        elif line.startswith("#"):
            section = line.lstrip("# ")
        elif line.strip():
            pending.append((at + 1, line.strip()))
        at += 1
    if pending:
        document.passages.append(_passage(pending, section))
    return document


def _passage(lines: list[tuple[int, str]], section: str) -> Passage:
    starts, offset = [], 0
    for _, text in lines:
        starts.append(offset)
        offset += len(text) + 1
    return Passage(" ".join(text for _, text in lines), tuple(starts), lines[0][0], section)


def _table(section: str, lines: list[str], first: int) -> Table:
    heads, _, *cells = map(_cells_of, lines)
    rows: list[Row] = []
    for number, texts in enumerate(cells, first + 2):
        # A blank name repeats the one above it.
        repeated = rows[-1].cells[0] if rows and not texts[0] else texts[0]
        rows.append(Row(number, (repeated, *texts[1:])))
    return Table(section, first, heads, tuple(rows))


def _cells_of(line: str) -> tuple[str, ...]:
    """Cells of a table's line; a bar behind a backslash belongs to a cell."""
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def _calls(lines: list[str], first: int) -> list[Call]:
    starts = [n for n, line in enumerate(lines) if line.startswith("$ ")]
    return [
        Call(first + start, lines[start][2:], tuple(lines[start + 1 : end]))
        for start, end in pairwise([*starts, len(lines)])
    ]
