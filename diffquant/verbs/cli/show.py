"""Terminal output of each verb: its result as text or JSON, and notes."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any

import typer

from diffquant.recipe.scheme import Scheme
from diffquant.support import progress
from diffquant.support.plain_data import replace_nonfinite
from diffquant.support.progress import clear_line, hide_line_briefly
from diffquant.support.terminal import fit_to_terminal
from diffquant.verbs.notes import LOGGER

Values = Mapping[str, Any]


def _as_text(result: Any, _: Values) -> str:
    return result.summary() if hasattr(result, "summary") else str(result)


def _as_json(result: Any, _: Values) -> str:
    if hasattr(result, "to_json"):
        return str(result.to_json()).rstrip()
    return json.dumps(result, default=_as_plain_data, indent=2)


def _as_plain_data(value: Any) -> Any:
    """Return the entries of a result or recipe, and the text of a scheme or path."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, Scheme):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


@dataclass(frozen=True)
class ResultView:
    """How the command line prints a verb's result.

    Attributes:
        text: function from the result and the verb's arguments to the text to print, or to None to print nothing.
        data: function from the result and the verb's arguments to JSON, or None if the verb has no JSON output.
        plan: function from the verb's plan, which `on_plan` gets, to the text to print.
        details: function from the result to the text that only --details prints, or None if there is no such text.
    """

    text: Callable[[Any, Values], str | None] = _as_text
    data: Callable[[Any, Values], str] | None = _as_json
    plan: Callable[[Any], str] = str
    details: Callable[[Any], str] | None = None

    def show(
        self, result: Any, given: Values, as_json: bool, error_text: str | None = None, is_detailed: bool = False
    ) -> None:
        """Print a result.

        Args:
            given: the verb's arguments by name.
            as_json: whether to print JSON, if the verb has JSON output.
            error_text: message of the error that is raised next, or None if there is no error. A result with this text
                is not printed.
            is_detailed: whether --details was given.
        """
        clear_line()
        if as_json and self.data:
            typer.echo(self.data(result, given))
            return
        text = self.text(result, given)
        parts = [text if text != error_text else None, self.details(result) if is_detailed and self.details else None]
        for part in parts:
            if part is not None:
                typer.echo(fit_to_terminal(part, sys.stdout))

    def print_plan_and_exit(self, plan: Any) -> None:
        """Print a plan, and exit before anything is written."""
        clear_line()
        typer.echo(self.plan(plan))
        raise typer.Exit


class _Notes(logging.Handler):
    """Prints messages of verbs. Messages that belong after the result are kept until it has been printed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "follows", False):
            self.kept.append(record)
        else:
            hide_line_briefly()
            typer.echo(fit_to_terminal(record.getMessage(), sys.stderr), err=True)


@contextmanager
def print_notes(as_json: bool) -> Iterator[None]:
    """Print verbs' messages on stderr inside the context.

    Messages of `say_after_result` are printed when the context exits: on stdout, or on stderr if they are asides or
    `as_json` is set.

    Args:
        as_json: whether stdout must contain only JSON.
    """
    handler, level = _Notes(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        for record in handler.kept:
            is_aside: bool = as_json or record.aside  # type: ignore[attr-defined]
            typer.echo(fit_to_terminal(record.getMessage(), sys.stderr if is_aside else sys.stdout), err=is_aside)


@contextmanager
def show_importing(command: str, library_prints: bool) -> Iterator[None]:
    """Show a "loading" line on a terminal while a command's imports run, which may take several seconds.

    The line is removed when the command prints something, shows progress, or ends.

    Args:
        command: name of the command.
        library_prints: whether a library prints messages, which could mix with the line; the line is then removed as
            soon as torch is imported.
    """
    with progress.show_waiting(f"{command}: loading ..."):
        if library_prints:
            import torch  # noqa: F401

            clear_line()
        yield


def print_piece(piece: str) -> None:
    """Print a piece of generated text, without a line break."""
    clear_line()
    typer.echo(piece, nl=False)


def _continuation_json(text: str, given: Values) -> str:
    return json.dumps({"prompt": given["prompt"], "text": text})


def _format_fits(fits: Any, given: Values) -> str:
    if not isinstance(fits, list):
        return _as_text(fits, given)
    from diffquant.calib.calibration.calibrate import range_quality_table

    return range_quality_table(fits, given["bits"])


def _calibration_json(fits: Any, given: Values) -> str:
    if not isinstance(fits, list):
        return _as_json(fits, given)
    from diffquant.checkpoints.ranges import read_any_ranges
    from diffquant.support.installation import provenance

    settings = {**read_any_ranges(given["output"]).settings, **provenance()}
    return json.dumps({"settings": settings, "fits": [replace_nonfinite(asdict(fit)) for fit in fits]})


def _format_bench(result: Any, _: Values) -> str:
    from diffquant.benchmarks.report import markdown

    return result if isinstance(result, str) else markdown(result)


# Verbs whose result is not simply printed as its summary.
VIEWS = {
    "quantize": ResultView(plan=lambda plan: plan.table()),
    "search": ResultView(
        lambda result, _: resolve_name("diffquant.calib.search.outputs:search_table")(result),
        plan=lambda search: search.estimate_time(),
    ),
    "calibrate": ResultView(_format_fits, _calibration_json),
    "eval": ResultView(
        lambda results, _: resolve_name("diffquant.measure.sweep.run:format_results")(results),
        lambda results, _: json.dumps({name: each.to_dict() for name, each in results.items()}),
    ),
    "sweep": ResultView(lambda result, _: result.table() if result.cells else None),
    "report": ResultView(lambda pages, _: f"wrote {pages[0]} and the pages of {len(pages) - 1} runs", data=None),
    "outliers": ResultView(lambda found, _: resolve_name("diffquant.calib.outlier_result:outlier_table")(found)),
    "bench": ResultView(_format_bench),
    "generate": ResultView(lambda *_: "", _continuation_json),
    "run": ResultView(lambda *_: "", _continuation_json),
    "fidelity": ResultView(lambda result, _: result and result.summary()),
    "verify": ResultView(details=lambda verification: verification.table()),
    "serve": ResultView(lambda *_: None, data=None),
    "demo": ResultView(lambda *_: None, data=None),
}
