"""The typer application that commands register with."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from diffquant import __version__
from diffquant.cli.verbs import Verb, VerbGroup
from diffquant.support.program import run_commands

app = typer.Typer(
    name="diffquant",
    cls=VerbGroup,
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Command = TypeVar("_Command", bound=Callable[..., None])


def verb(example: str, name: str | None = None) -> Callable[[_Command], _Command]:
    """Make a function a verb of the command line.

    Args:
        example: command line, without the program's name, that ends the verb's own help.
        name: name of the verb; the function's by default.
    """
    return app.command(name, cls=Verb, epilog=f"Example: `diffquant {example}`")


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
