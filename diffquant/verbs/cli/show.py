"""Output of each verb on a terminal: its result as text or JSON, and remarks beside it."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any

import typer

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
    if isinstance(result, str):
        return json.dumps(result)
    return json.dumps(result.to_dict() if hasattr(result, "to_dict") else asdict(result), indent=2, default=str)


@dataclass(frozen=True)
class Shown:
    """How a verb's result is shown, of the result and of what the verb was given.

    Attributes:
        text: text for people, or None if there is none.
        data: JSON for programs, or None if the verb has none.
        plan: text of what is only planned.
        details: text that only --details prints, or None if the verb has none.
    """

    text: Callable[[Any, Values], str | None] = _as_text
    data: Callable[[Any, Values], str] | None = _as_json
    plan: Callable[[Any], str] = str
    details: Callable[[Any], str] | None = None

    def show(
        self, result: Any, given: Values, as_json: bool, told: str | None = None, is_detailed: bool = False
    ) -> None:
        """Print a result.

        Args:
            told: text of an error that follows, which is not printed twice, or None if there is no error.
            is_detailed: whether its details are asked for.
        """
        clear_line()
        if as_json and self.data:
            typer.echo(self.data(result, given))
            return
        text = self.text(result, given)
        parts = [text if text != told else None, self.details(result) if is_detailed and self.details else None]
        for part in parts:
            if part is not None:
                typer.echo(fit_to_terminal(part, sys.stdout))

    def stop_at(self, plan: Any) -> None:
        """Print a plan, and end the command before anything is written."""
        clear_line()
        typer.echo(self.plan(plan))
        raise typer.Exit


class _Notes(logging.Handler):
    """Prints what verbs say; what follows a result is kept until that has been shown."""

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
def notes(as_json: bool) -> Iterator[None]:
    """While it is open, what verbs say is printed on stderr, and at its end what follows the result.

    Args:
        as_json: whether stdout is a program's, so that nothing else goes there.
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
def waiting(name: str, prints: bool) -> Iterator[None]:
    """Give a sign of life on a terminal, since what a verb imports and opens may take longer than people wait for one.

    The line goes away when the verb has progress to show or something to say, and at its end.

    Args:
        name: the command.
        prints: whether a library prints by itself: then the line is gone once torch is imported.
    """
    with progress.show_waiting(f"{name}: loading ..."):
        if prints:
            import torch  # noqa: F401

            clear_line()
        yield


def _made_by(place: str) -> Callable[[Any, Values], str]:
    """Return a function named "module:function", which is imported once there is a result."""
    return lambda result, _: resolve_name(place)(result)


def speak(piece: str) -> None:
    """Print a piece of a text as it comes."""
    clear_line()
    typer.echo(piece, nl=False)


def _continuation(text: str, given: Values) -> str:
    return json.dumps({"prompt": given["prompt"], "text": text})


def _fits(fits: Any, given: Values) -> str:
    from diffquant.calib.calibration.calibrate import fit_table

    return fit_table(fits, given["bits"])


def _calibration(fits: Any, given: Values) -> str:
    from diffquant.checkpoints.ranges import read_any_ranges
    from diffquant.support.installation import provenance

    settings = {**read_any_ranges(given["output"]).settings, **provenance()}
    return json.dumps({"settings": settings, "fits": [replace_nonfinite(asdict(fit)) for fit in fits]})


def _bench(result: Any, _: Values) -> str:
    from diffquant.benchmarks.report import markdown

    return result if isinstance(result, str) else markdown(result)


# What is shown in another way than as the summary of the result.
SHOWN = {
    "quantize": Shown(plan=lambda plan: plan.table()),
    "search": Shown(_made_by("diffquant.calib.search.outputs:search_table"), plan=lambda search: search.estimate()),
    "calibrate": Shown(_fits, _calibration),
    "eval": Shown(
        _made_by("diffquant.measure.sweep.run:results_text"),
        lambda results, _: json.dumps({name: each.to_dict() for name, each in results.items()}),
    ),
    "sweep": Shown(lambda result, _: result.table() if result.cells else None),
    "report": Shown(lambda pages, _: f"wrote {pages[0]} and the pages of {len(pages) - 1} runs", data=None),
    "outliers": Shown(_made_by("diffquant.calib.outlier_result:outlier_table")),
    "bench": Shown(_bench),
    "generate": Shown(lambda *_: "", _continuation),
    "run": Shown(lambda *_: "", _continuation),
    "fidelity": Shown(lambda result, _: result and result.summary()),
    "verify": Shown(details=lambda verification: verification.table()),
    "serve": Shown(lambda *_: None, data=None),
    "demo": Shown(lambda *_: None, data=None),
}
