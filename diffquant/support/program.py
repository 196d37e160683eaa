"""Command lines whose errors are one line and an exit code."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import NoReturn

import typer

from diffquant.errors import DiffQuantError
from diffquant.support import interruption
from diffquant.support.escaping import visible_streams
from diffquant.support.fitting import fitted
from diffquant.support.progress import clear_lines
from diffquant.support.spelling import command_line

# What torch's allocators for processors and GPUs, C++, ONNX Runtime and protobuf say.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "Failed to allocate memory",
    "Arena alloc failed",
    "Failed to serialize proto",
)


def run_program(command: Callable[..., None]) -> None:
    """Run a stand-alone command, such as `python -m diffquant.bench.programs.quantize`."""
    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(command)
    with exit_codes():
        program()


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with a line about what is raised inside; SIGTERM and SIGHUP interrupt as Ctrl-C does."""
    interruption.watch()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # Whoever started us closed it: Python has no stream then, and a file that is opened takes its descriptor.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        # Windows code pages lack λ and other characters that we print.
        sys.stdout.reconfigure(errors="replace")
    with visible_streams(), command_line():
        try:
            yield
        except DiffQuantError as error:
            _fail(f"error: {error}", error.exit_code)
        except OSError as error:
            # Writing to a terminal that was closed fails, too.
            if interruption.came():
                _fail("\ninterrupted", 130)
            _fail(f"error: {error}", 1)
        except SystemExit as stop:
            interrupt = _interrupt_behind(stop)
            if interrupt is None:
                raise
            _fail(f"\n{interrupt}" if str(interrupt) else "\ninterrupted", 130)
        except KeyboardInterrupt:
            _fail("\ninterrupted", 130)
        except Exception as error:
            if interruption.came():
                _fail("\ninterrupted", 130)
            if _is_out_of_memory(error):
                _fail("error: out of memory; nothing was put in place. Close other programs or take a smaller batch", 1)
            _fail(f"error: {_report(error)}", 1)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused to Python, or to a library, which may say so by an exception of another type."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def _report(error: Exception) -> str:
    """One line about an unexpected error, whose traceback goes to a file."""
    with tempfile.NamedTemporaryFile("w", prefix="diffquant-", suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    first_line = str(error).partition("\n")[0][:200]
    return (
        f"{type(error).__name__}: {first_line}\n"
        f"this is a bug in diffquant; please report it with the command and with the traceback in {file.name}"
    )


def _interrupt_behind(stop: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that typer turned into an exit; its message may say how to go on."""
    while stop is not None and not isinstance(stop, KeyboardInterrupt):
        stop = stop.__cause__ or stop.__context__
    return stop


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):
        clear_lines()
        sys.stderr.write(f"{fitted(message, sys.stderr)}\n")
    raise SystemExit(code)
