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
    minutes: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, help="About how long it may take; this sets the number of items.")
    ] = 4.0,
    pocket: Annotated[
        bool, typer.Option("--pocket", help="Use only the small trained models that come with diffquant.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show Figure 8 on trained models, then take one to 4 bits.

    That one is SmolLM2-135M, from PyPI; it is exported too, and runs in ONNX Runtime.
    """
    from diffquant.demo import demo as run

    run(output, minutes, pocket, overwrite, typer.echo)


@verb("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, and what each extra would add."""
    from diffquant.doctor import diagnose
    from diffquant.errors import MissingDependencyError
    from diffquant.export.native import kernel_name
    from diffquant.support.installation import install_command

    diagnosis = diagnose(kernel_name())
    typer.echo(json.dumps(diagnosis.to_dict(), indent=2) if as_json else str(diagnosis))
    if not diagnosis.complete:
        raise MissingDependencyError(f"a required package is missing: {install_command()}")
