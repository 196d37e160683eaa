"""The commands for a first look: demo, doctor."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import verb
from diffquant.cli.options import AsJson, Destination, Overwrite


@verb("demo --pocket")
def demo(
    output: Destination = Path("demo-output"),
    limit: Annotated[int, typer.Option(metavar="NUMBER", min=2, help="Items of each cell.")] = 100,
    pocket: Annotated[bool, typer.Option("--pocket", help="Use the small trained models that ship instead.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Take SmolLM2-135M through every step, on models at hand."""
    from diffquant.demo import demo as run
    from diffquant.demo import pocket_demo

    (pocket_demo if pocket else run)(output, limit, overwrite, typer.echo)


@verb("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, and what each extra would add."""
    from diffquant.doctor import diagnose
    from diffquant.errors import MissingDependencyError
    from diffquant.export.native import kernel_name

    diagnosis = diagnose(kernel_name())
    typer.echo(json.dumps(diagnosis.to_dict(), indent=2) if as_json else str(diagnosis))
    if not diagnosis.complete:
        raise MissingDependencyError("a required package is missing: pip install diffquant")
