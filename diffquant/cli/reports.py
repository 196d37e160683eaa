"""The command that shows runs: report."""

from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import verb


@verb("report logits search bench-output")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS", help="Folders of runs, or folders that hold some.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Index to write; index.html above the runs by default."),
    ] = None,
) -> None:
    """Rewrite the pages of runs, with an index of them.

    Runs are folders that sweep, search, outliers or bench wrote. Their pages link to each other and to the index.
    """
    from diffquant.verbs.runs import write_index

    index, *pages = write_index(runs, output)
    typer.echo(f"wrote {index} and the pages of {len(pages)} runs")
