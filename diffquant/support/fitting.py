"""Text for a terminal, whose lines end between words where the terminal would cut through one."""

import os
import re
import textwrap
from typing import TextIO

# The rule below a table's head, which says where its columns are.
_RULE = re.compile("-+(?:  -+)+")


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that a stream writes to; None if it is none, as for files and pipes."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def fitted(text: str, stream: TextIO) -> str:
    """A text as a stream shows it: on a terminal, a line that is too long goes on below, two columns further in."""
    columns = columns_of(stream)
    if columns is None:
        return text
    lines = text.split("\n")
    for at in reversed([number for number, line in enumerate(lines) if number and _RULE.fullmatch(line)]):
        end = next((n for n, line in enumerate(lines[at:], at) if not line), len(lines))
        lines[at - 1 : end] = _narrow(lines[at - 1 : end], columns)
    return "\n".join(line if len(line) <= columns else _folded(line, columns) for line in lines)


def _narrow(table: list[str], columns: int) -> list[str]:
    """A table in parts that fit, one below the other, each with the columns of names on the left.

    Args:
        table: head, rule and rows, as `report.tables.aligned` makes them.
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


def _folded(line: str, columns: int) -> str:
    inner = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
