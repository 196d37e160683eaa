"""Runs command lines with one-line errors, exit codes and signal handling."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from diffquant.errors import DiffQuantError
from diffquant.support.names import use_option_names
from diffquant.support.progress import clear_line
from diffquant.support.terminal import escape_streams, fit_to_terminal

_signal_arrived: list[int] = []


def watch_signals() -> None:
    """Make Ctrl-C, SIGTERM (schedulers) and SIGHUP (a closed terminal) raise KeyboardInterrupt.

    A signal that is ignored, as under nohup, or already handled is left alone.
    """
    # Windows has no SIGHUP.
    stopping = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    for number, usual in (*((each, signal.SIG_DFL) for each in stopping), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupt)


def was_interrupted() -> bool:
    """Return whether a signal has interrupted the program.

    The type of an exception does not show this, because compiled modules turn an interrupted import into another error.
    """
    return bool(_signal_arrived)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    _signal_arrived.append(number)
    raise KeyboardInterrupt


# Out-of-memory messages of torch's CPU and GPU allocators, C++, ONNX Runtime and protobuf.
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
    """Run a stand-alone command, such as `python -m research.bench.programs.quantize`."""
    import typer

    program = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    program.command()(command)
    with exit_codes():
        program()


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an exception raised inside this context into a one-line message and an exit code.

    SIGTERM and SIGHUP interrupt the program like Ctrl-C.
    """
    watch_signals()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The parent process closed this stream: Python has none then, and the next opened file gets its descriptor.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        # Windows code pages lack λ and other characters that we print.
        sys.stdout.reconfigure(errors="replace")
    with escape_streams(), use_option_names():
        try:
            yield
        except DiffQuantError as error:
            _fail(f"error: {error}", error.exit_code)
        except OSError as error:
            # Writing to a terminal that was closed fails, too.
            if was_interrupted():
                _fail("\ninterrupted", 130)
            _fail(f"error: {error}", 1)
        except SystemExit as stop:
            interrupt = _find_interrupt(stop)
            if interrupt is None:
                raise
            _fail(f"\n{interrupt}" if str(interrupt) else "\ninterrupted", 130)
        except KeyboardInterrupt:
            _fail("\ninterrupted", 130)
        except Exception as error:
            if was_interrupted():
                _fail("\ninterrupted", 130)
            if _is_out_of_memory(error):
                _fail("error: out of memory; no output was written. Close other programs or use a smaller batch", 1)
            _fail(f"error: {_report(error)}", 1)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether Python, or a library with an exception of another type, ran out of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def _report(error: Exception) -> str:
    """Return one line about an unexpected error and write its traceback to a file."""
    with tempfile.NamedTemporaryFile("w", prefix="diffquant-", suffix=".txt", delete=False, encoding="utf-8") as file:
        traceback.print_exception(error, file=file)
    first_line = str(error).partition("\n")[0][:200]
    return (
        f"{type(error).__name__}: {first_line}\n"
        f"this is a bug in diffquant; please report it with the command and with the traceback in {file.name}"
    )


def _find_interrupt(stop: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that typer turned into an exit; its message may say how to resume."""
    while stop is not None and not isinstance(stop, KeyboardInterrupt):
        stop = stop.__cause__ or stop.__context__
    return stop


def _fail(message: str, code: int) -> NoReturn:
    with suppress(OSError):
        clear_line()
        sys.stderr.write(f"{fit_to_terminal(message, sys.stderr)}\n")
    raise SystemExit(code)
