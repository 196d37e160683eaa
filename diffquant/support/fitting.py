"""Text for a terminal, whose lines end between words where the terminal would cut through one."""

import os
import textwrap
from typing import TextIO


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that a stream writes to; None where it is none, as for files and pipes."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def fitted(text: str, stream: TextIO) -> str:
    """A text as a stream shows it: on a terminal, a line that is too long goes on below, two columns further in."""
    columns = columns_of(stream)
    if columns is None:
        return text
    return "\n".join(line if len(line) <= columns else _folded(line, columns) for line in text.split("\n"))


def _folded(line: str, columns: int) -> str:
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
