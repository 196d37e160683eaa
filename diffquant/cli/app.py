"""The typer application that commands register with."""

import typer

from diffquant.support.program import run_commands

app = typer.Typer(
    name="diffquant",
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    run_commands(app)
