"""All pages that are held to raw files: of docs/ and research/pages, README, CHANGELOG and the pocket models' page."""

from importlib import import_module
from pkgutil import iter_modules

from research.check import pages
from research.check.page import Page

_MODULES = [import_module(f"{pages.__name__}.{module.name}") for module in iter_modules(pages.__path__)]
DECLARED: list[Page] = [
    page
    for module in _MODULES
    # A page's declaration may stand in two modules, the second of which adds to the first's.
    if not module.__name__.endswith("_words")
    for page in getattr(module, "PAGES", None) or [module.PAGE]
]
