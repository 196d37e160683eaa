"""Escapes untrusted text (names of models, tensors and folders) for a terminal or a Markdown file.

Whoever writes to one of them calls its function here. A page's template escapes HTML (`report/page.py`).
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Control characters, which a terminal obeys, and characters that change the direction of text.
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
_BREAKS = re.compile("[\t\r\n]+")
# Markup, HTML, mathematics, and starts of text that readers turn into links; not an underscore inside a word.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&$:@]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.", re.IGNORECASE)
# Start of a progress line: go to the start of the line, up one, clear the rest.
_MOVES = re.compile("(?:\r|\n|\x1b\\[[AK])*")


def visible(text: str) -> str:
    """A text with hidden characters written as a backslash, a u and their hexadecimal number; line breaks stay."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """A name for use within a line: hidden characters shown, line breaks removed."""
    return visible(_BREAKS.sub(" ", text))


def markdown_text(text: str) -> str:
    """A name as plain text in a paragraph, heading or cell of Markdown, whatever markup it holds."""
    # As numeric entities: some readers take < for HTML even after a backslash.
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", one_line(text))


def markdown_code(text: str) -> str:
    """A name as code in a paragraph, heading or cell of Markdown."""
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
        self._stream.write(kept + visible(text[len(kept) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make stdout and stderr show hidden characters."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _VisibleStream(sys.stdout), _VisibleStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
