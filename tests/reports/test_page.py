import base64
import hashlib
import re
from html.parser import HTMLParser

from diffquant.reports.page import Charts, Report, Section, render_page, sort_value
from diffquant.reports.plots import add_tooltip, as_svg, new_figure, series_style, style_axis
from diffquant.reports.tables import Link, Table
from tests.support.tables import in_one_test

EVIL = '<script>alert("1")</script>&\''


class Tags(HTMLParser):
    """Tags in order, and all text outside <style> and <svg>."""

    def __init__(self, document):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "path", "use", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "svg", "script"} & set(self.open):
            self.text += data


def document(*blocks, name="name", headline=(), links=()):
    return render_page(Report("sweep", name, headline, "", [Section("section", blocks)]), links)


BLOCKS = {
    "subtitle": lambda text: Section(text, []),
    "note": str,
    "items": lambda text: [text],
    "heads": lambda text: Table([text, "b"], [["1", "2"]]),
    "cells": lambda text: Table(["a", "b"], [[text, "2"]], [True]),
    "links": lambda text: Table(["a"], [[Link(text, text)]]),
    "legends": lambda text: Charts([], [("red", "x", text)]),
    "captions": lambda text: Charts([(text, "<svg></svg>")]),
    "summary": lambda text: Section(text, ["inside"], folded=True),
    "inside a fold": lambda text: Section("summary", [Table(["a"], [[text]])], folded=True),
    "names of facts": lambda text: {text: "value"},
    "facts": lambda text: {"name": text},
}


@in_one_test("make", BLOCKS.values())
def test_no_text_of_a_block_becomes_a_tag(make):
    tags = Tags(document(make(EVIL)))
    assert tags.tags.count("script") == 1  # our own
    assert EVIL in tags.text
    assert not tags.open


def test_names_headlines_and_links_are_escaped_too():
    tags = Tags(document(name=EVIL, headline=[EVIL], links=[Link(EVIL, EVIL)]))
    assert tags.tags.count("script") == 1
    assert tags.text.count(EVIL) == 4


def test_a_link_is_a_path_on_the_disk_and_never_a_scheme():
    assert Link("x", "javascript:alert(1)").address == "./javascript%3Aalert%281%29"
    assert Link("x", "../a b/report.html").address == "../a%20b/report.html"


def test_no_script_runs_but_the_one_whose_digest_the_policy_names():
    text = document()
    script = text[text.index("<script>") + len("<script>") : text.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_a_drawing_is_put_in_as_it_is_and_refers_to_nothing_outside():
    figure = new_figure(2, 2)
    figure.subplots().set_title("bits")
    drawing = as_svg(figure, "name")
    assert drawing.startswith("<svg")
    text = document(Charts([("", drawing)]))
    assert drawing in text
    assert "<?xml" not in text
    assert text.count("<!doctype") == 1


def test_a_drawing_takes_the_colours_of_the_page_and_tells_its_points():
    figure, tips = new_figure(2, 2), []
    axis = figure.subplots()
    style_axis(axis)
    axis.plot([1, 2], [1, 2], color="#D55E00")
    add_tooltip(axis, tips, 1, 1, "a < b")
    drawing = as_svg(figure, 'a "name"', tips)
    assert "<title>a &lt; b</title>" in drawing
    assert 'aria-label="a &quot;name&quot;"' in drawing
    assert "#d55e00" in drawing
    assert "var(--grid)" in drawing
    assert not {"#000000", "#ffffff", "#dddddd"} & set(re.findall("#[0-9a-f]{6}", drawing))


def test_no_two_of_many_series_look_alike():
    assert len({tuple(series_style(number).values()) for number in range(140)}) == 140


@in_one_test(
    ("text", "value"),
    [
        ("-5.8 [-10.4, -1.1]", -5.8),
        ("+0.0 [-0.8, +0.8]", 0.0),
        ("269.0 MB, 23.04 kB/token", 269e6),
        ("1.20 GB", 1.2e9),
        ("0.72 kB/token", 720.0),
        ("11.5 MB", 11.5e6),
        ("84,213,760", 84213760),
        ("2.5e-05", 2.5e-5),
        (".5", 0.5),
        ("-", None),
        ("failed", None),
        (Link("4.5 bits", "x"), 4.5),
    ],
)
def test_a_cell_sorts_by_the_number_that_it_begins_with(text, value):
    assert sort_value(text) == value


@in_one_test(("rows", "has_filter"), [(1, False), (12, False), (13, True)])
def test_a_table_of_more_than_a_dozen_rows_has_a_field_that_filters_them(rows, has_filter):
    assert ("input" in Tags(document(Table(["a"], [["1"]] * rows))).tags) == has_filter
