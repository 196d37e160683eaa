import csv
import io

from diffquant.report.tables import aligned, csv_text, markdown


def test_names_stand_left_and_numbers_right():
    assert aligned(["model", "bits"], [["a", "16"], ["longer name", "4"]]) == [
        "model        bits",
        "-----------  ----",
        "a              16",
        "longer name     4",
    ]


def test_more_columns_of_names_and_no_lines():
    assert aligned(["a", "b", "c"], [["x", "y", "100"]], names=2)[0] == "a  b    c"
    assert aligned(["a", "b"], []) == ["a  b", "-  -"]


def test_a_markdown_table_has_a_rule_below_its_head():
    assert markdown(["a", "b"], [["x", "1"]]) == ["| a | b |", "| --- | --- |", "| x | 1 |"]


def test_csv_is_read_back_and_no_text_in_it_is_a_formula():
    records = [{"model": "=HYPERLINK(1)", "kl": -0.5}, {"model": 'a "b", c', "bits": 4}, {"model": "@x"}]
    first, second, third = csv.DictReader(io.StringIO(csv_text(records)))
    assert first == {"model": "'=HYPERLINK(1)", "kl": "-0.5", "bits": ""}
    assert second == {"model": 'a "b", c', "kl": "", "bits": "4"}
    assert third["model"] == "'@x"
