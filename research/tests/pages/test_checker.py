"""The check of pages itself: what it must find on a page, and what it must let pass."""

import re

import pytest

from research.check.numbers import About, Disputed, fault, numbers_in
from research.check.page import Page, Unmeasured
from research.check.reading import units_of

TEXT = """\
# A page

Of V1 the error is 0.131
nats, with a section 3.7 of arXiv 2410.05258 and `0.25` in code. It is tenfold.

| model | KL, nats | bits |
|---|---|---|
| `one` | 0.0022 [0.0019, 0.0031] | 4 |
| two | - | 4 |

```
$ diffquant show
head  value
one   0.5
... two more
four  0.25
$ diffquant other
```
"""
PRINTED = ["head  value", "one   0.5", "two   1", "three 2", "four  0.25", "a footnote"]
VALUES = {("one", "KL, nats"): [0.00219, 0.001949, 0.0031], ("one", "bits"): [4], ("two", "bits"): [4]}


@pytest.fixture(autouse=True)
def all_are_read(monkeypatch):
    """No sentence needs to be listed, but in the tests of the lists."""
    monkeypatch.setattr("research.check.checks.listed", lambda _: _Everything())


class _Everything(dict):
    def __contains__(self, _):
        return True


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.md").write_text(TEXT)
    declared = Page("page.md")
    declared.table("model | KL, nats | bits", lambda row, column: VALUES[row, column])
    declared.says("the error is {} nats", 0.13149)
    declared.means("tenfold", True)
    declared.shows("diffquant show", lambda: PRINTED)
    return declared


def check(page, tmp_path, old="", new=""):
    assert old in TEXT
    (tmp_path / "page.md").write_text(TEXT.replace(old, new))
    return page.check(tmp_path / "page.md")


def test_a_page_that_is_right_passes(page, tmp_path):
    assert check(page, tmp_path) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("0.131", "0.132", "page.md:3: the page says 'the error is 0.132 nats', but 0.132: the raw file has 0.13149"),
        ("0.0022", "0.0023", "page.md:8: one, KL, nats: the page says '0.0023 .*, but 0.0023: the raw"),
        ("[0.0019, 0.0031]", "[0.0019]", "page.md:8: one, KL, nats: .*2 numbers stand there and 3 are declared"),
        ("| two | - | 4 |", "| two | - | 5 |", "page.md:9: two, bits: the page says '5'"),
        ("| two | - ", "| two | 0.1 ", "page.md:9: two, KL, nats: .*has nothing for it"),
        ("one   0.5", "one   0.6", "page.md:14: the page says 'one   0.6', but the command printed"),
        ("head  value", "four  0.25", "page.md:14: the page says 'one"),
        ("It is tenfold.", "", "nowhere does it say 'tenfold'"),
        ("It is", "The loss is 31 %. It is", "page.md:4: the page says '31 %'.*no declaration covers it"),
        ("It is", "It takes 28,551 steps. It is", "page.md:4: the page says '28,551'"),
        ("the error is", "the mistake is", "nowhere does it say 'the error is {} nats', which is declared"),
        ("| model |", "| kind |", "page.md:6: no declaration covers the table of kind"),
        ("$ diffquant other", "$ diffquant other\n1.5 s", "page.md:17: no declaration covers the output of"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(page, tmp_path, old, new, fault):
    faults = check(page, tmp_path, old, new)
    assert any(re.search(fault, each) for each in faults), faults


def test_a_statement_in_words_that_is_false_is_named(page, tmp_path):
    page.means("It is tenfold", False)
    assert check(page, tmp_path) == ["page.md:4: the page says 'It is tenfold', and by its raw files that is not so"]


def test_a_known_fault_is_one_again_when_it_is_mended(page, tmp_path):
    page.means("It is tenfold", False, dispute="118-fold")
    page.says("error is {} nats", Disputed(0.130485, "it is 0.130"))
    assert check(page, tmp_path) == []
    assert fault("0.130", Disputed(0.130485, "it is 0.130")) is not None
    page.means("tenfold", True, dispute="118-fold")
    (only,) = check(page, tmp_path)
    assert "take the dispute (118-fold) out" in only


def test_what_comes_from_no_raw_file_is_listed(tmp_path):
    (tmp_path / "page.md").write_text("It takes 0.5 s.\n\n| a | b |\n|---|---|\n| c | 7 |\n")
    page = Page("page.md")
    assert len(page.check(tmp_path / "page.md")) == 2
    page.leaves("0.5 s", "typed")
    page.table("a | b", lambda *_: Unmeasured("a size"))
    assert page.check(tmp_path / "page.md") == []
    page.leaves("0.7 s", "typed")
    assert page.check(tmp_path / "page.md") == ["page.md: nowhere does it say '0.7 s', which is listed as unmeasured"]


def test_tables_with_the_same_heads_are_told_apart_by_section(tmp_path):
    text = "# One\n\n| a | b |\n|---|---|\n| c | 7 |\n\n## Two\n\n| a | b |\n|---|---|\n| c | 8 |\n"
    (tmp_path / "page.md").write_text(text)
    page = Page("page.md")
    page.table("a | b", lambda *_: [7])
    (only,) = page.check(tmp_path / "page.md")
    assert only.startswith("page.md:9: two tables have these heads")
    page = Page("page.md")
    page.table("a | b", lambda *_: [7], section="One")
    page.table("a | b", lambda *_: [8], section="Two")
    assert page.check(tmp_path / "page.md") == []


def test_a_blank_name_repeats_the_one_above(tmp_path):
    (tmp_path / "page.md").write_text("| a | n | b |\n|---|---|---|\n| c | 1 | 7 |\n| | 4 | **8** |\n")
    page = Page("page.md")
    page.table("a | n | b", lambda row, column: [{"c, 1": 7, "c, 4": 8}[row]], names=2)
    assert page.check(tmp_path / "page.md") == []


@pytest.mark.parametrize(
    ("written", "value", "is_right"),
    [
        ("0.130", 0.130485, True),
        ("0.131", 0.130485, False),
        ("−5.8", -5.7999, True),
        ("28,551", 28551.4, True),
        ("28,551", 28551.6, False),
        ("2e-01", 0.24, True),
        ("2.5e-06", 2.46e-6, True),
        ("2.5e-06", 2.4e-6, False),
        ("0.125", 0.1245, True),
        ("3,000", About(3300.0, 0.1), True),
        ("3,000", About(3400.0, 0.1), False),
    ],
)
def test_a_number_is_right_as_rounded_as_it_is_written(written, value, is_right):
    assert (fault(written, value) is None) == is_right


def test_numbers_are_told_from_names():
    assert numbers_in("V1 of SmolLM2-135M: +0.2 %, −0.65 [1,024, 3e-4], x86 and 0.94-0.95") == [
        "+0.2",
        "−0.65",
        "1,024",
        "3e-4",
        "0.94",
        "0.95",
    ]


TOLD = "# Results\n\nThe error is 0.5 nats in all three. Nobody saw it grow.\n\n# How to\n\nGive two models.\n"


def unread(tmp_path, monkeypatch, text, declare=lambda page: None, **kind):
    """Faults of a text whose sentences are listed as they stand in `TOLD`."""
    pages = [Page("page.md", **kind) for _ in range(2)]
    for page in pages:
        page.says("error is {} nats", 0.5)
        declare(page)
    (tmp_path / "page.md").write_text(TOLD)
    known = {unit.digest: unit.text for unit in units_of(pages[0], pages[0].document(tmp_path / "page.md"))}
    monkeypatch.setattr("research.check.checks.listed", lambda _: known)
    (tmp_path / "page.md").write_text(text)
    return pages[1].check(tmp_path / "page.md")


def test_a_sentence_that_nothing_computes_may_not_change(tmp_path, monkeypatch):
    assert unread(tmp_path, monkeypatch, TOLD) == []
    for old, new in (("all three", "all four"), ("Nobody", "Everybody"), ("Give two", "Give ten")):
        fault, gone = unread(tmp_path, monkeypatch, TOLD.replace(old, new))
        assert new in fault
        assert "python -m research.check.reading page.md" in fault
        assert old in gone
    (gone,) = unread(tmp_path, monkeypatch, TOLD.replace(" Nobody saw it grow.", ""))
    assert gone.startswith("page.md: the sentence 'Nobody saw it grow.'... is gone")


def test_what_a_declaration_computes_may_change_with_its_raw_file(tmp_path, monkeypatch):
    (fault,) = unread(tmp_path, monkeypatch, TOLD.replace("0.5", "0.6"))
    assert "the raw file has 0.5" in fault
    is_declared = {"declare": lambda page: page.means("all three", True)}
    (fault,) = unread(tmp_path, monkeypatch, TOLD.replace("all three", "all four"), **is_declared)[1:2]
    assert "all four" in fault


def test_how_to_is_held_only_where_it_tells_a_result(tmp_path, monkeypatch):
    altered = TOLD.replace("two", "ten")
    assert unread(tmp_path, monkeypatch, altered, guides=("How to",)) == []
    assert unread(tmp_path, monkeypatch, altered.replace("Nobody", "Everybody"), is_guide=True) == []
    assert len(unread(tmp_path, monkeypatch, altered.replace("all three", "no"), is_guide=True)) == 2


def test_a_cell_in_words_is_a_sentence(tmp_path, monkeypatch):
    text = "# Results\n\n| claim | n |\n|---|---|\n| `a` loses less | 5 |\n"
    page = Page("page.md")
    page.table("claim | n", lambda *_: Unmeasured("a size"))
    (tmp_path / "page.md").write_text(text)
    assert [unit.text for unit in units_of(page, page.document(tmp_path / "page.md"))] == ["`a` loses less", "5"]
