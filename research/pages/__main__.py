"""Write the pages of results, or check that they are what their templates render.

python -m research.pages [--check]
"""

from typing import Annotated

import typer

from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from research.pages.render import ROOT, outputs


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where a page differs.")] = False,
) -> None:
    """Render the pages of results from their raw files."""
    rendered = outputs()
    stale = [page for page, text in rendered.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    if check and stale:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        raise UsageError(
            f"not what their templates render: {names}; edit the templates in research/pages, then make pages"
        )
    for page in stale:
        write_atomically(page, rendered[page])
        typer.echo(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
