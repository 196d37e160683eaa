"""Reads labelled texts in the formats of published classification tasks; the suffix selects the format.

.jsonl       an object a line with `text` and `label`
.csv, .tsv   a header with `text` and `label`, or `category` (Banking-77)
.label       TREC's lines, `DESC:manner How did serfdom develop ?`
.json        Clinc150: {"train": [[text, label], ...], "test": ...}
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from diffquant.errors import UsageError
from diffquant.support.files import read_bytes
from diffquant.support.names import first_few, option_name
from diffquant.support.plain_data import is_encodable_text, parse_json

TREC = ".label"
CLINC = ".json"
_LABEL_COLUMNS = ("label", "category")
_TREC_LINE = re.compile(r"([A-Z]+)(?::(\w+))?\s+(\S.*)")
# TREC abbreviates its classes; a model is asked for words.
_TREC_WORDS = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "numeric",
    "abb": "abbreviation",
    "cremat": "creation",
    "def": "definition",
    "desc": "description",
    "dismed": "disease",
    "dist": "distance",
    "exp": "expansion",
    "gr": "group",
    "ind": "individual",
    "instru": "instrument",
    "lang": "language",
    "mount": "mountain",
    "ord": "order",
    "perc": "percent",
    "techmeth": "technique",
    "temp": "temperature",
    "termeq": "term",
    "veh": "vehicle",
    "volsize": "size",
}


class Example(NamedTuple):
    """A text and its label in words, each on one line."""

    text: str
    label: str


@dataclass(frozen=True)
class Dataset:
    """A classification task's examples: `train` for demonstrations, `test` for questions."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Every class, in alphabetical order."""
        return tuple(sorted({example.label for example in self.train}))


# The place in the file, and the raw text and label there, None if missing.
Entry = tuple[str, object, object]


def load_dataset(train: Path, test: Path | None = None, fine: bool = False) -> Dataset:
    """Read a dataset; Clinc150's single file holds the test examples too.

    Args:
        fine: whether to use TREC's 50 fine classes instead of its 6 coarse ones.

    Raises:
        UsageError: a file cannot be read or has lines that are not examples (the message counts them all), there are
            fewer than two classes, or `test` has labels that `train` does not have.
    """
    if test is None and train.suffix != CLINC:
        raise UsageError(f"{train} has no test examples: give {option_name('test')}")
    if fine and {train.suffix, (test or train).suffix} != {TREC}:
        raise UsageError(
            f"{option_name('fine')} chooses among TREC's labels, in {TREC} files; {train} has one kind of label"
        )
    dataset = Dataset(_read(train, "train", fine), _read(test or train, "test", fine))
    if len(dataset.labels) < 2:
        raise UsageError(f"{train}: every example is {dataset.labels[0]!r}; two classes or more are needed")
    unknown = sorted({example.label for example in dataset.test} - set(dataset.labels))
    if unknown:
        raise UsageError(f"{test or train}: labels that {train} does not have: {first_few(map(repr, unknown), ', ')}")
    return dataset


def examples_digest(examples: tuple[Example, ...]) -> str:
    """A digest that changes with any example and with their order."""
    return hashlib.sha256(json.dumps(examples).encode()).hexdigest()[:16]


def _read(path: Path, split: str, fine: bool) -> tuple[Example, ...]:
    readers: dict[str, Callable[[str], Iterator[Entry]]] = {
        ".jsonl": _jsonl,
        ".csv": partial(_table, dialect=csv.excel),
        ".tsv": partial(_table, dialect=_Tabs),
        TREC: partial(_trec, fine=fine),
        CLINC: partial(_clinc, split=split),
    }
    if path.suffix not in readers:
        raise UsageError(f"cannot tell the format of {path} by its suffix; choose from {', '.join(readers)}")
    examples, faults = [], []
    try:
        for place, text, label in readers[path.suffix](_text_of(path)):
            try:
                examples.append(Example(_words(text, "text"), _words(label, "label").replace("_", " ")))
            except UsageError as error:
                faults.append(f"{place}: {error}")
    except (ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if faults:
        raise UsageError(f"{len(faults)} lines of {path} are not examples: {first_few(faults)}")
    if not examples:
        raise UsageError(f"{path} is empty: it needs texts with labels")
    return tuple(examples)


def _text_of(path: Path) -> str:
    try:
        raw = read_bytes(path)
        # TREC's training file has this one byte that is not UTF-8, where a space belongs.
        raw = re.sub(rb"\xf0(?![\x80-\xbf])", b" ", raw) if path.suffix == TREC else raw
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"cannot read {path}: it is not UTF-8 ({error}); convert it, with iconv for instance"
        ) from error


def _jsonl(text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entry = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            fields = entry if isinstance(entry, dict) else {}
            yield f"line {number}", fields.get("text"), fields.get("label")


class _Tabs(csv.excel_tab):
    """The dialect of .tsv files, where quotes usually have no special meaning."""

    quoting = csv.QUOTE_NONE


def _table(text: str, dialect: type[csv.Dialect]) -> Iterator[Entry]:
    rows = csv.DictReader(io.StringIO(text, newline=""), dialect=dialect)
    heads = rows.fieldnames or []
    column = next((name for name in _LABEL_COLUMNS if name in heads), None)
    if rows.fieldnames is not None and ("text" not in heads or column is None):
        raise ValueError(f"its header is {', '.join(heads)}; columns text and {' or '.join(_LABEL_COLUMNS)} are needed")
    if twice := [name for name in ("text", column) if heads.count(name) > 1]:
        raise ValueError(f"its header has {' and '.join(map(str, twice))} twice; rename the columns that do not count")
    for row in rows:
        surplus = row.get(None) or ()
        if any(map(str.strip, surplus)):
            raise ValueError(
                f"line {rows.line_num} has {len(heads) + len(surplus)} fields and the header {len(heads)}; "
                "a text with commas needs quotes in .csv, and in .tsv none has tabs"
            )
        yield f"line {rows.line_num}", row["text"], row[column]


def _trec(text: str, fine: bool) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            parts = _TREC_LINE.fullmatch(line.strip())
            coarse, kind, question = parts.groups() if parts else (None, None, None)
            codes = (coarse, kind) if fine else (coarse,)
            label = None if None in codes else " ".join(_TREC_WORDS.get(code, code) for code in codes if code)
            yield f"line {number}", question, label


def _clinc(text: str, split: str) -> Iterator[Entry]:
    splits = parse_json(text)
    if not isinstance(splits, dict) or not isinstance(splits.get(split), list):
        raise ValueError(f'expected {{"{split}": [[text, label], ...]}}, as in Clinc150\'s data_full.json')
    for number, entry in enumerate(splits[split], 1):
        query, label = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        yield f"{split} {number}", query, label


def _words(value: object, what: str) -> str:
    """A field's words on one line.

    Raises:
        UsageError: there are none, or the field is no text.
    """
    if value is not None and not is_encodable_text(value):
        raise UsageError(f"{what} must be words, got {value!r:.40}")
    words = str(value or "").split()
    if not words:
        raise UsageError(f"no {what}")
    return " ".join(words)
