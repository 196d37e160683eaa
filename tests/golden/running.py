"""Runs a case and keeps what it wrote and printed."""

import contextlib
import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from diffquant.verbs.cli import main
from tests.golden.cases import Case
from tests.golden.sources import write_source
from tests.golden.views import stable, stable_text, view

EXPECTED = Path(__file__).parent / "expected"


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Exit code, standard output and every file that the command wrote, as plain data."""
    for source in case.sources:
        write_source(folder, source)
    for command in case.before:
        _command(command, folder)
    there = _files(folder)
    code, printed = _command(case.command, folder)
    written = [name for name, content in _files(folder).items() if there.get(name) != content]
    # A cell's name changes with the code that measures it, and sweep.json has all that it holds.
    names = {re.sub(r"-[0-9a-f]{12}\.", "-KEY.", name): folder / name for name in written if "/cells/" not in name}
    files = {name: view(file, case.is_exact) for name, file in names.items()}
    return {"exit": code, "printed": _printed(printed.replace(f"{folder}/", "")), "files": files}


def expected(case: Case) -> Path:
    """The case's golden."""
    return EXPECTED / f"{case.name}.json"


def help_texts() -> dict[str, str]:
    """The help of the program and of each verb, by name, as 100 columns show it."""
    import typer

    from diffquant.verbs.cli import app

    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    words = {"diffquant": "--help"} | {verb: f"{verb} --help" for verb in verbs}
    shown = {name: _command(command, Path.cwd())[1] for name, command in words.items()}
    # Started by python -m, the program names itself by its caller.
    return {name: re.sub(r"^Usage: .*?diffquant", "Usage: diffquant", text) for name, text in shown.items()}


def _command(command: str, folder: Path) -> tuple[int, str]:
    out = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", ["diffquant", *shlex.split(command)]),
            mock.patch.dict(os.environ, {"COLUMNS": "100"}),
            contextlib.redirect_stdout(out),
        ):
            main()
    except SystemExit as stop:
        return int(stop.code or 0), out.getvalue()
    finally:
        os.chdir(before)
    return 0, out.getvalue()


def _printed(text: str) -> Any:
    try:
        return stable(json.loads(text))
    except ValueError:
        return stable_text(text).splitlines()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
