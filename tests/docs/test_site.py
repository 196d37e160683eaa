"""The documentation site's menu, which `make docs` builds from."""

from tests.docs.commands import ROOT


def test_every_page_has_a_place_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    folders = ("docs", "research/pages")
    pages = [str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).glob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in menu]
