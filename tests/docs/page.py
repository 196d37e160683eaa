"""What a page's figures are, declared beside it and checked against the raw files.

A page stays plain Markdown. Its declaration says of each table, transcript and figure in a sentence which value of
which raw file it is; numbers are compared as rounded as they are written. What looks like a measurement and is not
declared is an error, unless it is listed as unmeasured with its reason. What a page says in words of its results is
declared, too, or stands in a list of sentences that were read (`tests.docs.reading`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from tests.docs.markdown import Call, Document, Passage, Row, Table, read_document
from tests.docs.numbers import NUMBER, Expected, faults, numbers_in
from tests.docs.reading import listed, units_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"

_UNITS = r"%|×|s\b|ms\b|MB\b|GB\b|kB\b|nats\b|dB\b|points\b|tokens/s|items/s|times\b|decades\b|minutes\b|bytes\b"
_MEASURED = re.compile(rf"({NUMBER})(?:\s(?:{_UNITS})|%|×)?")


@dataclass(frozen=True)
class Unmeasured:
    """Why a figure comes from no raw file: the paper's, arithmetic, a size that was chosen."""

    why: str


Values = Sequence[Expected] | str | Unmeasured | None
# From a row's label and a column's name to the values of the cell's numbers, or to its text.
CellValues = Callable[[str, str], Values]


@dataclass(frozen=True)
class TableFigures:
    """The figures of the table that has these heads.

    Attributes:
        row: label of a row, where several tables have these heads.
        section: heading that the table stands under, where that tells several apart.
        names: number of first columns, whose texts joined by commas are a row's label.
        columns: names of the other columns, where their heads do not tell them apart.
    """

    heads: tuple[str, ...]
    values: CellValues
    row: str | None
    section: str | None
    names: int
    columns: tuple[str, ...]

    def is_of(self, table: Table) -> bool:
        labels = [_without_marks(row.label) for row in table.rows]
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
        dispute: why the page is known to be wrong; None where it is not. An error again as soon as it is right.
    """

    text: str
    holds: bool
    dispute: str | None


@dataclass(frozen=True)
class Transcript:
    """The output of a command that a page shows: the lines that it printed, of which the page may leave out some."""

    command: str
    lines: Callable[[], Sequence[str]] | Unmeasured


@dataclass
class Page:
    """A page's declaration.

    Attributes:
        name: its path from the root.
        is_guide: whether the whole page tells how to do something; only its declared sentences are held then.
        guides: headings of the sections that do so, on a page that also tells results.
    """

    name: str
    is_guide: bool = False
    guides: tuple[str, ...] = ()
    tables: list[TableFigures] = field(default_factory=list)
    sentences: list[Sentence] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)
    unmeasured: dict[str, str] = field(default_factory=dict)

    def table(
        self,
        heads: str,
        values: CellValues,
        row: str | None = None,
        section: str | None = None,
        names: int = 1,
        columns: Sequence[str] = (),
    ) -> None:
        """Declare a table by its heads, which " | " parts."""
        texts = tuple(head.strip() for head in heads.split(" | "))
        self.tables.append(TableFigures(texts, cache(values), row, section, names, tuple(columns) or texts[names:]))

    def says(self, text: str, *values: Expected) -> None:
        """Declare the figures of a sentence."""
        self.sentences.append(Sentence(text, values))

    def means(self, text: str, holds: bool, dispute: str | None = None) -> None:
        """Declare a statement in words, and whether it is true."""
        self.claims.append(Claim(text, holds, dispute))

    def shows(self, command: str, lines: Callable[[], Sequence[str]] | Unmeasured) -> None:
        """Declare the output of a command, by how the command begins."""
        self.transcripts.append(Transcript(command, lines))

    def leaves(self, text: str, why: str) -> None:
        """List text whose figures come from no raw file."""
        self.unmeasured[text] = why

    def check(self, text_file: Path | None = None) -> list[str]:
        """Every fault of the page, each with its file and line."""
        document = self.document(text_file)
        checks = (_table_faults, _transcript_faults, _claim_faults, _sentence_faults, _unread_faults)
        return [fault for faults_of in checks for fault in faults_of(self, document)]

    def document(self, text_file: Path | None = None) -> Document:
        """The page, or another text in its place, as its parts, and the cells that no raw file is compared with."""
        document = read_document(text_file or ROOT / self.name, self.name)
        for table in document.tables:
            declared = next((each for each in self.tables if each.is_of(table)), None)
            document.cells += _cells_of_words(table, declared)
        return document

    def spans(self, passage: Passage) -> list[tuple[int, int]]:
        """Where the pieces of a passage are that its declarations compute or list."""
        patterns = [sentence.pattern for sentence in self.sentences]
        patterns += [_words(text) for text in (*(claim.text for claim in self.claims), *self.unmeasured)]
        return [match.span() for pattern in patterns for match in pattern.finditer(passage.text)]


def _table_faults(page: Page, document: Document) -> list[str]:
    wrong: list[str] = []
    used: set[int] = set()
    for table in document.tables:
        declared = next((each for each in page.tables if each.is_of(table)), None)
        if declared and id(declared) in used:
            wrong.append(f"{page.name}:{table.line}: two tables have these heads; give row= or section=")
        elif declared:
            wrong += [fault for row in table.rows for fault in _row_faults(page.name, row, declared)]
        elif any(numbers_in(_without_code(cell)) for row in table.rows for cell in row.cells[1:]):
            wrong.append(f"{page.name}:{table.line}: no declaration covers the table of {' | '.join(table.heads)}")
        used.add(id(declared))
    return wrong + [
        f"{page.name}: there is no table of {' | '.join(each.heads)}, which is declared"
        for each in page.tables
        if id(each) not in used
    ]


def _cells_of_words(table: Table, declared: TableFigures | None) -> list[Passage]:
    """The cells that no raw file is compared with: all of a table without figures, else those listed as unmeasured."""
    names = declared.names if declared else len(table.heads)
    figures = [
        (row, cell, _is_unmeasured(declared, _label(row, names), column))
        for row in table.rows
        if declared
        for column, cell in zip(declared.columns, row.cells[names:], strict=True)
        if numbers_in(_without_code(cell))
    ]
    if all(is_unmeasured for *_, is_unmeasured in figures):
        cells = [(row, cell) for row in table.rows for cell in row.cells]
    else:
        cells = [(row, cell) for row, cell, is_unmeasured in figures if is_unmeasured]
    return [Passage(cell, (0,), row.line, table.section) for row, cell in cells if cell]


def _is_unmeasured(declared: TableFigures, label: str, column: str) -> bool:
    try:
        return isinstance(declared.values(label, column), Unmeasured)
    except (LookupError, ValueError):
        return False


def _label(row: Row, names: int) -> str:
    return ", ".join(map(_without_marks, row.cells[:names]))


def _row_faults(name: str, row: Row, declared: TableFigures) -> list[str]:
    label = _label(row, declared.names)
    faults_by_column = {
        column: _cell_fault(cell, declared.values, label, column)
        for column, cell in zip(declared.columns, row.cells[declared.names :], strict=True)
    }
    cells = dict(zip(declared.columns, row.cells[declared.names :], strict=True))
    return [
        f"{name}:{row.line}: {label}, {column}: the page says {cells[column]!r}, but {fault}"
        for column, fault in faults_by_column.items()
        if fault
    ]


def _cell_fault(cell: str, values_of: CellValues, label: str, column: str) -> str | None:
    """Why a cell is not what its raw file says; None where it is."""
    numbers = numbers_in(_without_code(cell))
    if not numbers:
        return None
    try:
        values = values_of(label, column)
    except (LookupError, ValueError) as error:
        return f"its raw file has nothing for it: {error!r}"
    if isinstance(values, Unmeasured):
        return None
    if values is None:
        return "no value is declared for it"
    if isinstance(values, str):
        return None if values == cell else f"the raw file gives {values!r}"
    return faults(numbers, values)


def _transcript_faults(page: Page, document: Document) -> list[str]:
    wrong, used = [], set()
    for call in document.calls:
        declared = next((each for each in page.transcripts if call.command.startswith(each.command)), None)
        used.add(id(declared))
        if not call.output:
            continue
        if declared is None:
            wrong.append(f"{page.name}:{call.line}: no declaration covers the output of {call.command!r}")
        elif not isinstance(declared.lines, Unmeasured):
            wrong += _line_faults(page.name, call, declared.lines())
    return wrong + [
        f"{page.name}: there is no transcript of {each.command!r}, which is declared"
        for each in page.transcripts
        if id(each) not in used
    ]


def _line_faults(name: str, call: Call, printed: Sequence[str]) -> list[str]:
    """Faults of a transcript; "... " stands for lines that are left out, and so may the last ones be."""
    wrong, at = [], 0
    for number, line in enumerate(call.output, call.line + 1):
        if line.startswith("... ") or not line.strip():
            continue
        found = next((n for n in range(at, len(printed)) if printed[n].rstrip() == line.rstrip()), None)
        if found is None:
            rest = [each for each in printed[at:] if each.strip()]
            wrong.append(f"{name}:{number}: the page says {line!r}, but the command printed {rest[:1]!r}")
        else:
            at = found + 1
    return wrong


def _claim_faults(page: Page, document: Document) -> list[str]:
    wrong = []
    for claim in page.claims:
        matches = _places_of(_words(claim.text), document)
        if not matches:
            wrong.append(f"{page.name}: nowhere does it say {claim.text!r}, which is declared")
        for passage, match in matches:
            place = f"{page.name}:{passage.line_at(match.start())}: the page says {match.group()!r}"
            if not claim.holds and claim.dispute is None:
                wrong.append(f"{place}, and by its raw files that is not so")
            if claim.holds and claim.dispute is not None:
                wrong.append(f"{place}, which is right now; take the dispute ({claim.dispute}) out of the declaration")
    return wrong


def _places_of(pattern: "re.Pattern[str]", document: Document) -> list[tuple[Passage, "re.Match[str]"]]:
    texts = (*document.passages, *document.cells)
    return [(passage, match) for passage in texts for match in pattern.finditer(passage.text)]


@cache
def _words(text: str) -> "re.Pattern[str]":
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def _sentence_faults(page: Page, document: Document) -> list[str]:
    wrong: list[str] = []
    covered: dict[int, list[tuple[int, int]]] = {id(passage): [] for passage in document.passages}
    for sentence in page.sentences:
        matches = _places_of(sentence.pattern, document)
        if not matches:
            wrong.append(f"{page.name}: nowhere does it say {sentence.text!r}, which is declared")
        for passage, match in matches:
            covered.setdefault(id(passage), []).append(match.span())
            if why := faults(match.groups(), sentence.values):
                wrong.append(
                    f"{page.name}:{passage.line_at(match.start())}: the page says {match.group()!r}, but {why}"
                )
    for text in page.unmeasured:
        matches = _places_of(_words(text), document)
        if not matches:
            wrong.append(f"{page.name}: nowhere does it say {text!r}, which is listed as unmeasured")
        for passage, match in matches:
            covered.setdefault(id(passage), []).append(match.span())
    return wrong + [fault for p in document.passages for fault in _uncovered(page.name, p, covered[id(p)])]


def _unread_faults(page: Page, document: Document) -> list[str]:
    """Sentences and cells that tell results in words, are computed by no declaration, and are not listed as read."""
    units, known = units_of(page, document), listed(page.name)
    program = f"then run python -m tests.docs.reading {page.name}"
    changed = [
        f"{page.name}:{unit.line}: {unit.text!r} is new or was changed, and no declaration computes it; read it "
        f"against what it rests on, {program}"
        for unit in units
        if unit.digest not in known
    ]
    gone = known.keys() - {unit.digest for unit in units}
    return changed + [
        f"{page.name}: the sentence {known[digest]!r}... is gone; see whether the page still says enough, {program}"
        for digest in known
        if digest in gone
    ]


def _uncovered(name: str, passage: Passage, covered: Sequence[tuple[int, int]]) -> list[str]:
    """Numbers of a passage that look like measurements and that nothing declares."""
    bare = _without_code(passage.text)
    wrong = []
    for match in _MEASURED.finditer(bare):
        number = match.group(1)
        is_measurement = "." in number or "," in number or match.group() != number
        if is_measurement and not any(low <= match.start(1) < high for low, high in covered):
            around = passage.text[max(0, match.start() - 40) : match.end() + 30]
            wrong.append(
                f"{name}:{passage.line_at(match.start())}: the page says {match.group()!r} (... {around} ...), but no "
                "declaration covers it; declare it or list it as unmeasured"
            )
    return wrong


# Code, the targets of links, and names that look like numbers.
_NAMES = re.compile(
    r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)|arXiv \d+\.\d+|[Ss]ection \d+\.\d+|Apache-2\.0|Motif-2-12\.7B"
    r"|ONNX Runtime \d+\.\d+"
)


def _without_code(text: str) -> str:
    """The text with what is no figure blanked, every other character in its place."""
    return _NAMES.sub(lambda match: " " * len(match.group()), text)


def _without_marks(label: str) -> str:
    return label.replace("`", "").replace("**", "")
