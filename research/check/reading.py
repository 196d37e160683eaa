"""Sentences that tell results and that no declaration computes: they may change only when somebody reads them again.

    python -m research.check.reading [PAGE...]

A page's sentences are declared piece by piece. What is left of a sentence stands in `read/PAGE.txt` by its digest. A
word that is changed there, or a sentence that is taken out, is an error until the list is written again, which this
program does. That a sentence is listed proves that it is as it was when somebody read it, and not that it is true.
"""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from research.check.markdown import Document, Passage

if TYPE_CHECKING:
    from research.check.page import Page

LISTS = Path(__file__).parent / "read"
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[(\d])")
_DECLARED = "¶"


@dataclass(frozen=True)
class Unit:
    """The numbers of a sentence or a cell that no declaration computes.

    Attributes:
        line: where it begins.
        text: the sentence, with a sign in place of each piece that is declared.
    """

    line: int
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:10]


@cache
def listed(name: str) -> Mapping[str, str]:
    """How each sentence of a page's list begins, by its digest."""
    file = _list_of(name)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(line.split(" ", 1) for line in lines)


def units_of(page: "Page", document: Document) -> list[Unit]:
    """Sentences of a page that tell results in words and are computed by no declaration."""
    units = []
    for passage in (*document.passages, *document.cells):
        spans = page.spans(passage)
        for start, end in _sentences(passage.text):
            of_sentence = [(low, high) for low, high in spans if low < end and high > start]
            text = _without(passage.text, start, end, of_sentence)
            if (is_told(page, passage) or of_sentence) and re.search(r"[A-Za-z0-9]", text):
                units.append(Unit(passage.line_at(start), text))
    return units


def is_told(page: "Page", passage: Passage) -> bool:
    """Whether a passage tells results, and not how to do something."""
    return not page.is_guide and passage.section not in page.guides


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for gap in _SENTENCE_ENDS.finditer(text):
        yield start, gap.start()
        start = gap.end()
    yield start, len(text)


def _without(text: str, start: int, end: int, spans: Sequence[tuple[int, int]]) -> str:
    """A sentence with each of its declared pieces as one sign."""
    kept, at = [], start
    for low, high in sorted(spans):
        if high > at:
            kept += [text[at : max(at, low)], _DECLARED]
            at = min(high, end)
    return "".join([*kept, text[at:end]])


def _list_of(name: str) -> Path:
    return LISTS / f"{name.removesuffix('.md').replace('/', '-')}.txt"


def write_list(page: "Page") -> None:
    """List what a page says now."""
    lines = [f"{unit.digest} {unit.text[:20]}\n" for unit in units_of(page, page.document())]
    file = _list_of(page.name)
    if lines:
        file.write_text("".join(dict.fromkeys(lines)), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    from research.check.declared import DECLARED

    LISTS.mkdir(exist_ok=True)
    for each in DECLARED:
        if each.name in sys.argv[1:] or not sys.argv[1:]:
            write_list(each)
