"""Every figure of the pages is its raw file's: tables, transcripts, sentences."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from tests.docs import pages
from tests.docs.page import ROOT, Page

DECLARED = [import_module(f"{pages.__name__}.{module.name}") for module in iter_modules(pages.__path__)]


@pytest.mark.parametrize("page", [module.PAGE for module in DECLARED], ids=lambda page: page.name)
def test_every_figure_of_a_page_is_that_of_its_raw_file(page: Page):
    faults = page.check()
    assert not faults, "\n" + "\n".join(faults)
