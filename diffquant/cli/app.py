"""The typer application that commands register with."""

from typing import Annotated

import typer

from diffquant import __version__
from diffquant.support.program import run_commands

app = typer.Typer(
    name="diffquant",
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    run_commands(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffquant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """What every command line may have before its verb."""
