"""Every figure of the pages is its raw file's: tables, transcripts, sentences."""

import pytest

from research.check.declared import DECLARED
from research.check.page import ROOT


@pytest.mark.parametrize("page", DECLARED, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_that_of_its_raw_file(page):
    faults = page.check()
    assert not faults, f"{len(faults)} faults; research/check/pages says what each figure is:\n" + "\n".join(faults)


def test_every_page_is_declared():
    there = ["README.md", "CHANGELOG.md", "diffquant/data/pocket/README.md"]
    there += [
        str(file.relative_to(ROOT)) for folder in ("docs", "research/pages") for file in (ROOT / folder).glob("*.md")
    ]
    assert sorted(page.name for page in DECLARED) == sorted(there)
