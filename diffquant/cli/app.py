"""The typer application: a command for each verb."""

from typing import Annotated

import typer

from diffquant.cli.command import command, former_names, name_of
from diffquant.cli.docstrings import documentation
from diffquant.cli.verbs import Verb, VerbGroup
from diffquant.support.program import exit_codes
from diffquant.support.version import __version__
from diffquant.verbs import GROUPS

app = typer.Typer(
    name="diffquant",
    cls=VerbGroup,
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    with exit_codes():
        app()


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
    """Options that every command line may have before its verb."""


for _verb in (verb for group in GROUPS.values() for verb in group):
    _former = former_names(_verb)
    app.command(
        name_of(_verb),
        cls=Verb,
        epilog=f"Example: `{documentation(_verb).example}`",
        context_settings={"token_normalize_func": lambda name, former=_former: former.get(name, name)},
    )(command(_verb))
