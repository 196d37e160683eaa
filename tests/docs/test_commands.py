"""The commands on the pages: each is one that there is, with options that it has; a short one is run again."""

import re
import shlex
from importlib.util import find_spec

import pytest
import typer

from diffquant.calib.analysis.outliers import OutlierOptions, find_outliers
from diffquant.cli import app
from diffquant.data import pocket_models
from tests.docs.page import ROOT
from tests.docs.raw import raw

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "research/pages").glob("*.md"))
PAGES.append(ROOT / "diffquant/data/pocket/README.md")
COMMANDS = typer.main.get_command(app).commands
_BEGINNING = r"((?:diffquant|python -m (?:diffquant|research)[\w.]*|make) [^`\n]+)"
_IN_BLOCK, _IN_SPAN = re.compile(rf"^(?:\$ )?{_BEGINNING}", re.MULTILINE), re.compile(f"`{_BEGINNING}`")


def calls_on(page):
    """Command lines of a page's blocks and code spans, with the line that each stands on."""
    text, at, calls = page.read_text(encoding="utf-8"), 1, []
    for number, piece in enumerate(text.split("```")):
        pattern = _IN_BLOCK if number % 2 else _IN_SPAN
        joined = piece.replace("\\\n", "  ")
        calls += [(at + joined.count("\n", 0, match.start(1)), match.group(1)) for match in pattern.finditer(joined)]
        at += piece.count("\n")
    return calls


def fault_of(call):
    """Why a command line cannot be run; None where it can."""
    words = shlex.split(call, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[1] in targets else f"there is no target {words[1]}"
    if words[0] == "python":
        return None if find_spec(words[2]) else f"there is no module {words[2]}"
    if words[1].startswith("-"):
        return None
    if words[1] not in COMMANDS:
        return f"there is no command {words[1]}"
    names = [name for option in COMMANDS[words[1]].params for name in (*option.opts, *option.secondary_opts)]
    options = [word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)]
    unknown = [option for option in options if option not in (*names, "--help")]
    return f"{words[1]} has no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_that_there_is(page):
    faults = [f"{page.name}:{line}: {call}: {why}" for line, call in calls_on(page) if (why := fault_of(call))]
    assert not faults, "\n".join(faults)


def test_commands_that_there_are_not_are_named():
    assert fault_of("diffquant quantise MODEL") == "there is no command quantise"
    assert fault_of("diffquant inspect MODEL --everything -o x") == "inspect has no --everything, -o"
    assert fault_of("python -m research.studies.nothing") == "there is no module research.studies.nothing"
    assert fault_of("make nothing") == "there is no target nothing"
    assert fault_of("diffquant sweep A B -o out --bits 8,6 --task needle:4") is None


def test_the_pocket_models_have_the_outliers_that_their_page_gives():
    options = OutlierOptions(tokens=20_000, window=256, dtype="float32")
    again = find_outliers(sorted(pocket_models("needle")), options)
    committed = {model["name"]: model for model in raw("pocket-needle-outliers/outliers.json")["models"]}
    assert {model.fingerprint for model in again.models} == {model["fingerprint"] for model in committed.values()}
    for model in again.models:
        for kind, magnitudes in model.overall.items():
            expected = committed[model.name]["overall"][kind]
            assert magnitudes.top[1] == pytest.approx(expected["top"]["1"], rel=1e-3)
            assert magnitudes.median == pytest.approx(expected["median"], rel=0.01)
