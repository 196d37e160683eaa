"""Write the pages of results, or check that they are what their templates render.

Pictures of other numbers or other code than today's are drawn again, too.

python -m research.pages [--check]
"""

from typing import Annotated

import typer

from diffquant.errors import UsageError
from diffquant.support.files import write_atomically
from research.pages.render import ROOT, outputs
from research.studies.plots import draw_again, stale_pictures


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where a page differs.")] = False,
) -> None:
    """Render the pages of results from their raw files."""
    rendered, pictures = outputs(), stale_pictures()
    stale = [page for page, text in rendered.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    if check and (stale or pictures):
        names = ", ".join(str(file.relative_to(ROOT)) for file in (*stale, *pictures))
        raise UsageError(
            f"not what templates and raw files give: {names}; edit the templates in research/pages, then make pages"
        )
    draw_again(pictures)
    for page in stale:
        write_atomically(page, rendered[page])
        typer.echo(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
