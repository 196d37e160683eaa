"""The documentation site: a hook of MkDocs by which it shows the repository's pages where they are.

Pages link to one another, and to pictures and programs elsewhere in the repository. So that these links hold on the
site too, it is made of the repository's own tree: the pages that mkdocs.yml names, and every file that they link to.
"""

import re
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from diffquant.verbs.cli import app

CLI_PAGE = "docs/cli.md"
_STYLE = ".md-typeset td:first-child code { white-space: nowrap }"
_TARGET = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the pages that the navigation names in the place of those of docs_dir, with all that they link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    root = Path(config.config_file_path).parent
    for name in reached(root, named(config.nav)):
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep a command in a table's first column on one line."""
    return output.replace("</head>", f"<style>{_STYLE}</style></head>", 1)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the verbs to the page of the command line, as its own help describes them."""
    if page.file.src_uri != CLI_PAGE:
        return markdown
    command = typer.main.get_command(app)
    reference = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="diffquant"), name="diffquant")
    _, first, verbs = reference.partition("## `diffquant ")
    # Brackets of a usage are no links.
    return f"{markdown}\n\n{first}{verbs}".replace("][", r"]\[")


def named(nav: object) -> list[str]:
    """Paths of the pages that a navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [name for entry in entries for name in named(entry)]


def reached(root: Path, pages: list[str]) -> list[str]:
    """Paths of the pages and of all files that they link to, directly or through one another.

    A link that leads to no file is left to MkDocs, which refuses it by page.
    """
    found, open_pages = dict.fromkeys(pages), list(pages)
    while open_pages:
        page = root / open_pages.pop()
        for target in _TARGET.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve()
            name = file.relative_to(root).as_posix() if file.is_relative_to(root) else None
            if name and file.is_file() and name not in found:
                found[name] = None
                open_pages += [name] * (file.suffix == ".md")
    return list(found)
