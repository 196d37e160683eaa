"""Texts as a terminal shows them: no line is wider than it, and of a table no cell is lost or cut."""

import sys
from itertools import pairwise

from diffquant.reports.tables import align_columns
from diffquant.support import terminal
from tests.support.tables import in_one_test

HEAD = ["model", "target", "scheme", "KL [95 %]", "margin", "difference [95 %]", "stored"]
ROWS = [
    ["SmolLM2-135M", "-", "16", "-", "-", "-", "269.0 MB, 23.04 kB/token"],
    ["SmolLM2-135M", "weights", "4:g32", "0.37 [0.32, 0.41]", "+0.94", "+1.0 [-3.6, +5.5]", "122.4 MB"],
]


def shown(monkeypatch, text, columns):
    monkeypatch.setattr(terminal, "terminal_width", lambda _: columns)
    return terminal.fit_to_terminal(text, sys.stdout)


@in_one_test("columns", [60, 80, 100])
def test_a_table_that_is_too_wide_is_shown_in_parts_with_its_names(monkeypatch, columns):
    text = "\n".join(["before", "", *align_columns(HEAD, ROWS, names=3), "", "a note " * 30])
    got = shown(monkeypatch, text, columns)
    assert max(map(len, got.splitlines())) <= columns
    parts = [part.splitlines() for part in got.split("\n\n")[1:-1]]
    assert len(parts) > 1
    cells = [[text for part in parts for text in columns_of_line(part, number)[3:]] for number in (0, 2, 3)]
    assert cells == [line[3:] for line in (HEAD, *ROWS)]
    assert all(columns_of_line(part, n)[:3] == line[:3] for part in parts for n, line in ((0, HEAD), (2, ROWS[0])))


def columns_of_line(table, number):
    """The cells of a table's line, by the rule below its head."""
    ends = [0]
    for dashes in table[1].split("  "):
        ends.append(ends[-1] + len(dashes) + 2)
    return [table[number][start:end].strip() for start, end in pairwise(ends)]


def test_what_fits_and_what_no_terminal_reads_stays_as_it_is(monkeypatch):
    text = "\n".join(align_columns(HEAD, ROWS, names=3))
    for columns in (None, max(map(len, text.splitlines()))):
        assert shown(monkeypatch, text, columns) == text


def test_a_long_line_goes_on_below_two_columns_further_in(monkeypatch):
    assert shown(monkeypatch, "  one two three", 10) == "  one two\n    three"
