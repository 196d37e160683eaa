"""Check a page by its declaration and yield each fault with its file and line."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from research.check.declarations import TableFigures, Unmeasured, label_of, without_code, words_of
from research.check.markdown import Call, Document, Passage, Row
from research.check.numbers import NUMBER, faults, numbers_in
from research.check.reading import listed, units_of

if TYPE_CHECKING:
    from research.check.page import Page

_UNITS = r"%|×|s\b|ms\b|MB\b|GB\b|kB\b|nats\b|dB\b|points\b|tokens/s|items/s|times\b|decades\b|minutes\b|bytes\b"
_MEASURED = re.compile(rf"({NUMBER})(?:\s(?:{_UNITS})|%|×)?")


def table_faults(page: "Page", document: Document) -> list[str]:
    wrong: list[str] = []
    used: set[int] = set()
    for table in document.tables:
        declared = next((each for each in page.tables if each.is_of(table)), None)
        if declared and id(declared) in used:
            wrong.append(f"{page.name}:{table.line}: two tables have these heads; give row= or section=")
        elif declared:
            wrong += [fault for row in table.rows for fault in _row_faults(page.name, row, declared)]
        elif any(numbers_in(without_code(cell)) for row in table.rows for cell in row.cells[1:]):
            wrong.append(f"{page.name}:{table.line}: no declaration covers the table of {' | '.join(table.heads)}")
        used.add(id(declared))
    return wrong + [
        f"{page.name}: there is no table of {' | '.join(each.heads)}, which is declared"
        for each in page.tables
        if id(each) not in used
    ]


def _row_faults(name: str, row: Row, declared: TableFigures) -> list[str]:
    label, heads = label_of(row, declared.names), declared.heads[declared.names :]
    return [
        f"{name}:{row.line}: {label}, {head}: the page says {cell!r}, but {fault}"
        for at, (head, cell) in enumerate(zip(heads, row.cells[declared.names :], strict=True))
        if (fault := _cell_fault(cell, declared, label, at))
    ]


def _cell_fault(cell: str, declared: TableFigures, label: str, at: int) -> str | None:
    """Why a cell is not what its raw file says; None if it is."""
    numbers = numbers_in(without_code(cell))
    if not numbers:
        return None
    try:
        values = declared.values(label, at)
    except (LookupError, ValueError) as error:
        return f"its raw file has nothing for it: {error!r}"
    if isinstance(values, Unmeasured):
        return None
    if values is None:
        return "no value is declared for it"
    if isinstance(values, str):
        return None if values == cell else f"the raw file gives {values!r}"
    return faults(numbers, values)


def transcript_faults(page: "Page", document: Document) -> list[str]:
    wrong, used = [], set()
    for call in document.calls:
        declared = next((begin for begin in page.transcripts if call.command.startswith(begin)), None)
        used.add(declared)
        if not call.output:
            continue
        if declared is None:
            wrong.append(f"{page.name}:{call.line}: no declaration covers the output of {call.command!r}")
        elif not isinstance(lines := page.transcripts[declared], Unmeasured):
            wrong += _line_faults(page.name, call, lines())
    return wrong + [
        f"{page.name}: there is no transcript of {begin!r}, which is declared"
        for begin in page.transcripts
        if begin not in used
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


def claim_faults(page: "Page", document: Document) -> list[str]:
    wrong = []
    for claim in page.claims:
        matches = _places_of(words_of(claim.text), document)
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


def sentence_faults(page: "Page", document: Document) -> list[str]:
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
        matches = _places_of(words_of(text), document)
        if not matches:
            wrong.append(f"{page.name}: nowhere does it say {text!r}, which is listed as unmeasured")
        for passage, match in matches:
            covered.setdefault(id(passage), []).append(match.span())
    return wrong + [fault for p in document.passages for fault in _uncovered(page.name, p, covered[id(p)])]


def unread_faults(page: "Page", document: Document) -> list[str]:
    """Sentences and cells that tell results in words, are computed by no declaration, and are not listed as read."""
    units, known = units_of(page, document), listed(page.name)
    program = f"then run python -m research.check.reading {page.name}"
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
    bare = without_code(passage.text)
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
