"""Prepares text for a terminal or a page: escapes untrusted names, wraps long lines, and prints results as summaries.

Names of models, tensors and folders may hold anything. Call a function of this module before writing one to a terminal
or to Markdown; a page's template escapes HTML (`reports/page.py`).
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, TextIO

# Control characters, which a terminal obeys, and characters that change the direction of text.
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
_BREAKS = re.compile("[\t\r\n]+")
# Markup, HTML, mathematics, and starts of text that readers turn into links; not an underscore inside a word.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&$:@]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.", re.IGNORECASE)
# Start of a progress line: go to the start of the line, up one, clear the rest.
_MOVES = re.compile("(?:\r|\n|\x1b\\[[AK])*")


def escape_hidden(text: str) -> str:
    """Replace hidden characters with a backslash, a u and their hexadecimal number; line breaks stay."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Make a name fit in a line: escape hidden characters and remove line breaks."""
    return escape_hidden(_BREAKS.sub(" ", text))


def markdown_text(text: str) -> str:
    """Escape a name for plain text in a paragraph, heading or cell of Markdown, whatever markup it holds."""
    # As numeric entities: some readers take < for HTML even after a backslash.
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", one_line(text))


def markdown_code(text: str) -> str:
    """Format a name as code in a paragraph, heading or cell of Markdown."""
    name = one_line(text)
    if not name.strip("`").strip() or "`" in name or "|" in name:
        # A code span cannot hold these everywhere, but an HTML element can.
        return f"<code>{markdown_text(name)}</code>"
    return f"`{name}`"


class _VisibleStream:
    """A stream to a terminal or a log that shows hidden characters instead of sending them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        moves = _MOVES.match(text)
        kept = moves[0] if moves else ""
        self._stream.write(kept + escape_hidden(text[len(kept) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escape_streams() -> Iterator[None]:
    """Make stdout and stderr show hidden characters inside this context."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _VisibleStream(sys.stdout), _VisibleStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


# The rule below a table's head, whose dashes show where its columns are.
_RULE = re.compile("-+(?:  -+)+")


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream writes to, or None if it is a file or pipe."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def fit_to_terminal(text: str, stream: TextIO) -> str:
    """Wrap lines that are too long for a stream's terminal; continuation lines are indented by two columns."""
    columns = terminal_width(stream)
    if columns is None:
        return text
    lines = text.split("\n")
    for at in reversed([number for number, line in enumerate(lines) if number and _RULE.fullmatch(line)]):
        end = next((n for n, line in enumerate(lines[at:], at) if not line), len(lines))
        lines[at - 1 : end] = _split_table(lines[at - 1 : end], columns)
    return "\n".join(line if len(line) <= columns else _fold_line(line, columns) for line in lines)


def _split_table(table: list[str], columns: int) -> list[str]:
    """Split a table into parts that fit, one below the other, each with the columns of names on the left.

    Args:
        table: head, rule and rows, as `reports.tables.align_columns` makes them.
    """
    spans = [match.span() for match in re.finditer("-+", table[1])]
    # Names begin where their column does; numbers end where it does.
    numbers = (n for n, (start, _) in enumerate(spans) if any(row[start : start + 1].isspace() for row in table[2:]))
    names = spans[: next(numbers, len(spans))]
    room = columns - (names[-1][1] if names else 0)
    others = spans[len(names) :]
    if len(table[1]) <= columns or not others or max(end - start for start, end in others) + 2 > room:
        return table
    parts: list[list[tuple[int, int]]] = [[]]
    for start, end in others:
        if sum(e - s + 2 for s, e in parts[-1]) + end - start + 2 > room:
            parts.append([])
        parts[-1].append((start, end))
    shown = [["  ".join(row[s:e].ljust(e - s) for s, e in (*names, *part)).rstrip() for row in table] for part in parts]
    return [line for number, part in enumerate(shown) for line in ([""] if number else []) + part]


def _fold_line(line: str, columns: int) -> str:
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


class PrintableResult:
    """A result whose `str` is the text that the command prints, and whose `repr` has the first line of this text."""

    def summary(self) -> str:
        """Summarize the result for people in a few lines."""
        return str(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        """Return the text as HTML for a notebook, which keeps its columns aligned."""
        return f"<pre>{escape(str(self))}</pre>"
