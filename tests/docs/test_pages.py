"""Every figure of the pages is its raw file's: tables, transcripts, sentences."""

from importlib import import_module
from pkgutil import iter_modules

import pytest

from tests.docs import pages
from tests.docs.page import ROOT, Page

_MODULES = [import_module(f"{pages.__name__}.{module.name}") for module in iter_modules(pages.__path__)]
DECLARED: list[Page] = [
    page
    for module in _MODULES
    # A page's declaration may stand in two modules, the second of which adds to the first's.
    if not module.__name__.endswith("_words")
    for page in getattr(module, "PAGES", None) or [module.PAGE]
]


@pytest.mark.parametrize("page", DECLARED, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_that_of_its_raw_file(page):
    faults = page.check()
    assert not faults, f"{len(faults)} faults; tests/docs/pages says what each figure is:\n" + "\n".join(faults)


def test_every_page_is_declared():
    there = ["README.md", "CHANGELOG.md", "diffquant/data/pocket/README.md"]
    there += [
        str(file.relative_to(ROOT)) for folder in ("docs", "research/pages") for file in (ROOT / folder).glob("*.md")
    ]
    assert sorted(page.name for page in DECLARED) == sorted(there)
