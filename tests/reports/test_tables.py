import csv
import io

from diffquant.reports.tables import Link, Table, align_columns, format_csv, format_size, markdown
from tests.support.tables import in_one_test


def test_names_stand_left_and_numbers_right():
    assert align_columns(["model", "bits"], [["a", "16"], ["longer name", "4"]]) == [
        "model        bits",
        "-----------  ----",
        "a              16",
        "longer name     4",
    ]


def test_a_markdown_table_has_a_rule_below_its_head():
    assert markdown(["a", "b"], [["x", "1"]]) == ["| a | b |", "| --- | --- |", "| x | 1 |"]


def test_csv_is_read_back_and_no_text_in_it_is_a_formula():
    records = [{"model": "=HYPERLINK(1)", "kl": -0.5}, {"model": 'a "b", c', "bits": 4}]
    first, second = csv.DictReader(io.StringIO(format_csv(records)))
    assert first == {"model": "'=HYPERLINK(1)", "kl": "-0.5", "bits": ""}
    assert second == {"model": 'a "b", c', "kl": "", "bits": "4"}


@in_one_test("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_text_that_a_spreadsheet_would_compute_follows_an_apostrophe(start):
    """OWASP's list of what begins a formula; a cell is one line, so tabs and line ends are spaces in it."""
    text, written = f"{start}1+1", f"{' ' if start.isspace() else start}1+1"
    assert list(csv.DictReader(io.StringIO(format_csv([{"a": text}]), newline=""))) == [{"a": f"'{written}"}]
    assert list(csv.DictReader(io.StringIO(format_csv([{"a": f"x{text}"}]), newline=""))) == [{"a": f"x{written}"}]


@in_one_test(
    ("size", "text"),
    [(999_949_999, "999.9 MB"), (1e9, "1.00 GB"), (1.555e9, "1.55 GB"), (49_999, "0.0 MB"), (0, "0.0 MB")],
)
def test_sizes_are_in_powers_of_ten(size, text):
    assert format_size(size) == text


def test_a_table_is_the_same_for_a_terminal_and_a_document():
    table = Table(["run", "verb", "bits"], [[Link("a run", "a/report.html"), "sweep", "4"]], names=2)
    assert table.text_lines() == align_columns(["run", "verb", "bits"], [["a run", "sweep", "4"]], names=2)
    assert table.markdown() == markdown(["run", "verb", "bits"], [["a run", "sweep", "4"]])
