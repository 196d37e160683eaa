from diffquant.report.tables import aligned, markdown


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
