"""The commands on a page, and why one cannot be run."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import typer

from diffquant.verbs.cli import app

ROOT = Path(__file__).parents[2]
# Pages whose commands a user types.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / name for name in ("diffquant/data/pocket/README.md", "research/README.md", "research/train/README.md")]
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
