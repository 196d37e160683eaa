"""The parts of a page's declaration: figures of tables and sentences, statements in words, transcripts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from research.check.markdown import Passage, Row, Table
from research.check.numbers import NUMBER, Expected, numbers_in


@dataclass(frozen=True)
class Unmeasured:
    """Why a figure comes from no raw file: the paper's, arithmetic, a size that was chosen."""

    why: str


Values = Sequence[Expected] | str | Unmeasured | None
# From a row's label and a column's head to the values of the cell's numbers, or to its text.
CellValues = Callable[[str, str], Values]
# From a row's label to the same of all its cells.
RowValues = Callable[[str], Sequence[Values]]


@dataclass(frozen=True)
class TableFigures:
    """The figures of the table that has these heads.

    Attributes:
        values: function of a row's label and a cell's place behind the label.
        row: label of a row, where several tables have these heads.
        section: heading that the table stands under, where that tells several apart.
        names: number of first columns, whose texts joined by commas are a row's label.
    """

    heads: tuple[str, ...]
    values: Callable[[str, int], Values]
    row: str | None
    section: str | None
    names: int

    def is_of(self, table: Table) -> bool:
        labels = [without_marks(row.label) for row in table.rows]
        is_there = self.section in (None, table.section)
        return is_there and table.heads == self.heads and self.row in (None, *labels)


@dataclass(frozen=True)
class Sentence:
    """A piece of running text with {} for each figure, and the values of these."""

    text: str
    values: Sequence[Expected]

    @cached_property
    def pattern(self) -> "re.Pattern[str]":
        pieces = [r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in self.text.split("{}")]
        return re.compile(f"({NUMBER})".join(pieces))


@dataclass(frozen=True)
class Claim:
    """A piece of running text without a figure, and whether the raw files bear it out.

    Attributes:
        dispute: why the page is known to be wrong; None if it is not. An error again as soon as it is right.
    """

    text: str
    holds: bool
    dispute: str | None


# The lines that a command printed, of which a page may leave out some.
Printed = Callable[[], Sequence[str]] | Unmeasured


def cells_of_words(table: Table, declared: TableFigures | None) -> list[Passage]:
    """The cells that no raw file is compared with: all of a table without figures, else those listed as unmeasured."""
    names = declared.names if declared else len(table.heads)
    figures = [
        (row, cell, _is_unmeasured(declared, label_of(row, names), at))
        for row in table.rows
        if declared
        for at, cell in enumerate(row.cells[names:])
        if numbers_in(without_code(cell))
    ]
    if all(is_unmeasured for *_, is_unmeasured in figures):
        cells = [(row, cell) for row in table.rows for cell in row.cells]
    else:
        cells = [(row, cell) for row, cell, is_unmeasured in figures if is_unmeasured]
    return [Passage(cell, (0,), row.line, table.section) for row, cell in cells if cell]


def _is_unmeasured(declared: TableFigures, label: str, at: int) -> bool:
    try:
        return isinstance(declared.values(label, at), Unmeasured)
    except (LookupError, ValueError):
        return False


def label_of(row: Row, names: int) -> str:
    return ", ".join(map(without_marks, row.cells[:names]))


@cache
def words_of(text: str) -> "re.Pattern[str]":
    return re.compile(r"\s+".join(map(re.escape, text.split())))


# Code, the targets of links, and names that look like numbers.
_NAMES = re.compile(
    r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|arXiv \d+\.\d+|[Ss]ection \d+\.\d+|Apache-2\.0|Motif-2-12\.7B"
    r"|ONNX Runtime \d+\.\d+"
)


def without_code(text: str) -> str:
    """The text with what is no figure blanked, every other character in its place."""
    return _NAMES.sub(lambda match: " " * len(match.group()), text)


def without_marks(label: str) -> str:
    return label.replace("`", "").replace("**", "")
