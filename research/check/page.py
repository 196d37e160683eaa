"""A page's figures, declared beside it and checked against the raw files.

A page stays plain Markdown. Its declaration says of each table, transcript and figure in a sentence which value of
which raw file it is; numbers are compared as rounded as they are written. What looks like a measurement and is not
declared is an error, unless it is listed as unmeasured with its reason. What a page says in words of its results is
declared, too, or stands in a list of sentences that were read (`research.check.reading`).
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from research.check import checks
from research.check.declarations import (
    CellValues,
    Claim,
    Printed,
    RowValues,
    Sentence,
    TableFigures,
    Unmeasured,
    Values,
    cells_of_words,
    words_of,
)
from research.check.markdown import Document, Passage, read_document
from research.check.numbers import Expected

__all__ = ["BENCHED", "RESULTS", "ROOT", "CellValues", "Page", "Unmeasured", "Values"]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research" / "results"
# What the bench measured last on a machine of this class; the research has the rest.
BENCHED = ROOT / "bench" / "results"


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
    transcripts: dict[str, Printed] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)

    def table(
        self,
        heads: str,
        values: CellValues | Unmeasured,
        row: str | None = None,
        section: str | None = None,
        names: int = 1,
    ) -> None:
        """Declare a table by its heads, which " | " parts, and by a function of a row's label and a column's head."""
        texts = _texts(heads)
        of_cell = (lambda *_: values) if isinstance(values, Unmeasured) else values
        self.tables.append(
            TableFigures(texts, cache(lambda label, at: of_cell(label, texts[names + at])), row, section, names)
        )

    def rows(self, heads: str, cells: RowValues, section: str | None = None, names: int = 1) -> None:
        """Declare a table by a function of a row's label, which gives all of the row's cells."""
        cells_of = cache(cells)
        self.tables.append(TableFigures(_texts(heads), lambda label, at: cells_of(label)[at], None, section, names))

    def says(self, text: str, *values: Expected) -> None:
        """Declare the figures of a sentence."""
        self.sentences.append(Sentence(text, values))

    def means(self, text: str, holds: bool, dispute: str | None = None) -> None:
        """Declare a statement in words, and whether it is true."""
        self.claims.append(Claim(text, holds, dispute))

    def shows(self, command: str, lines: Printed) -> None:
        """Declare the output of a command, by how the command begins."""
        self.transcripts[command] = lines

    def leaves(self, text: str, why: str) -> None:
        """List text whose figures come from no raw file."""
        self.unmeasured[text] = why

    def check(self, text_file: Path | None = None) -> list[str]:
        """Every fault of the page, each with its file and line."""
        document = self.document(text_file)
        kinds = (
            checks.table_faults,
            checks.transcript_faults,
            checks.claim_faults,
            checks.sentence_faults,
            checks.unread_faults,
        )
        return [fault for faults_of in kinds for fault in faults_of(self, document)]

    def document(self, text_file: Path | None = None) -> Document:
        """The page, or another text in its place, as its parts, and the cells that no raw file is compared with."""
        document = read_document(text_file or ROOT / self.name, self.name)
        for table in document.tables:
            declared = next((each for each in self.tables if each.is_of(table)), None)
            document.cells += cells_of_words(table, declared)
        return document

    def spans(self, passage: Passage) -> list[tuple[int, int]]:
        """Where the pieces of a passage are that its declarations compute or list."""
        patterns = [sentence.pattern for sentence in self.sentences]
        patterns += [words_of(text) for text in (*(claim.text for claim in self.claims), *self.unmeasured)]
        return [match.span() for pattern in patterns for match in pattern.finditer(passage.text)]


def _texts(heads: str) -> tuple[str, ...]:
    return tuple(head.strip() for head in heads.split(" | "))
