"""Command lines, run so that every error a user can cause becomes one line and an exit code."""

import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from diffquant.errors import DiffQuantError


def run_program(command: Callable[..., None]) -> None:
    """Run a command that is a program of its own, such as `python -m diffquant.bench.programs.quantize`."""
    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(command)
    run_commands(program)


def run_commands(program: typer.Typer) -> None:
    """Run the command that the arguments name."""
    try:
        program()
    except DiffQuantError as error:
        _fail(f"error: {error}", error.exit_code)
    except OSError as error:
        _fail(f"error: {error}", 1)
    except SystemExit as stop:
        interrupt = _interrupt_behind(stop)
        if interrupt is None:
            raise
        _fail(f"\n{interrupt}" if str(interrupt) else "\ninterrupted", 130)


def _interrupt_behind(stop: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that typer turned into an exit; what it interrupted may have said how to go on."""
    while stop is not None and not isinstance(stop, KeyboardInterrupt):
        stop = stop.__cause__ or stop.__context__
    return stop


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(code)
