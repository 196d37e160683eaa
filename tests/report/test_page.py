from html.parser import HTMLParser

import pytest

from diffquant.report.page import Drawing, Facts, Fold, Items, Note, Section, Subtitle, Table, page
from diffquant.report.plots import as_svg, new_figure

EVIL = '<script>alert("1")</script>&\''


class Tags(HTMLParser):
    """Tags in order, and all text outside <style> and <svg>."""

    def __init__(self, document):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "path", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "svg"} & set(self.open):
            self.text += data


BLOCKS = {
    "subtitle": Subtitle,
    "note": Note,
    "items": lambda text: Items([text]),
    "errors": lambda text: Items([text], errors=True),
    "heads": lambda text: Table([text, "b"], [["1", "2"]]),
    "cells": lambda text: Table(["a", "b"], [[text, "2"]], [True]),
    "summary": lambda text: Fold(text, Note("inside")),
    "inside a fold": lambda text: Fold("summary", Table(["a"], [[text]])),
    "names of facts": lambda text: Facts({text: "value"}),
    "facts": lambda text: Facts({"name": text}),
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_no_text_of_a_block_becomes_a_tag(make):
    tags = Tags(page("title", [], [Section("section", [make(EVIL)])]))
    assert "script" not in tags.tags
    assert EVIL in tags.text
    assert not tags.open


def test_titles_are_escaped_too():
    tags = Tags(page(EVIL, [Note(EVIL)], [Section(EVIL, [])]))
    assert "script" not in tags.tags
    assert tags.text.count(EVIL) == 4


def test_a_drawing_is_put_in_as_it_is_and_refers_to_nothing_outside():
    figure = new_figure(2, 2)
    figure.subplots().set_title("bits")
    drawing = as_svg(figure)
    assert drawing.startswith("<svg")
    document = page("title", [], [Section("section", [Drawing(drawing)])])
    assert drawing in document
    assert "<?xml" not in document
    assert document.count("<!doctype") == 1


def test_baselines_are_shaded_and_names_stand_left():
    rows = [["a", "x", "1"], ["b", "y", "2"]]
    document = page("title", [], [Section("section", [Table(["m", "n", "o"], rows, [True, False], names=2)])])
    assert '<tr class="baseline"><td class="name">a</td><td class="name">x</td><td>1</td></tr>' in document
    assert '<tr><td class="name">b</td><td class="name">y</td><td>2</td></tr>' in document
    assert '<th class="name">m</th><th class="name">n</th><th>o</th>' in document
