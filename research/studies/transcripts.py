"""Record what the commands on README, docs/quantize.md and docs/verify.md print, and put it onto the pages.

    python -m research.studies.transcripts SmolLM2-135M-Instruct.Q4_1.gguf
    python -m research.studies.transcripts SmolLM2-135M-Instruct.Q4_1.gguf --folder made --again export,verify

The commands are the pages' own, in the order in which each finds what it needs, in a folder of their own. What they
print goes to research/results/transcripts.json and into the pages' blocks; a machine that is busy tells other times.
With `--again` only some are run, in a folder where the others were; the others' records stay, with their environment.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from diffquant.bench.environment import environment
from diffquant.errors import UsageError
from diffquant.support.files import write_atomically, write_json
from research.studies.results import read_json

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "quantize.md", ROOT / "docs" / "verify.md")
RECORDED = ROOT / "research" / "results" / "transcripts.json"

# Sweeps take an hour each and have raw files of their own.
ORDER = ("convert", "inspect", "quantize", "generate", "export", "verify", "run")


def main(
    model: Annotated[Path, typer.Argument(help="SmolLM2-135M-Instruct.Q4_1.gguf.")],
    again: Annotated[str, typer.Option(help="Commands to run; all by default.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Folder to run them in; a new one by default.")] = None,
) -> None:
    """Run the pages' commands and put what they print onto them."""
    lines_by_page = {page: page.read_text(encoding="utf-8").splitlines() for page in PAGES}
    lines = [line for page_lines in lines_by_page.values() for line in page_lines]
    calls = sorted(
        {line[2:]: None for line in lines if line.startswith("$ diffquant ") and line.split()[2] in ORDER},
        key=lambda call: ORDER.index(call.split()[1]),
    )
    verbs = again.split(",") if again else ORDER
    former = {_without_comment(each["command"]): each for each in _former_records()} if again else {}
    records: list[dict[str, Any]] = []
    with TemporaryDirectory() as new:
        place = folder or Path(new)
        if not (place / model.name).exists():
            (place / model.name).symlink_to(model.absolute())
        for call in calls:
            is_run = call.split()[1] in verbs
            record = {"output": _printed_by(call, place)} if is_run else former[_without_comment(call)]
            records.append(record | {"command": call})
    outputs = {each["command"]: each["output"] for each in records}
    write_json(RECORDED, {"environment": environment("onnxruntime"), "transcripts": records})
    for page, page_lines in lines_by_page.items():
        write_atomically(page, "\n".join(with_outputs(page_lines, outputs)) + "\n")
    typer.echo(f"wrote {RECORDED} and {', '.join(map(str, PAGES))}")


def _without_comment(call: str) -> str:
    return call.partition("#")[0].rstrip()


def _former_records() -> list[dict[str, Any]]:
    """The earlier record: each command with its environment."""
    former = read_json(RECORDED)
    return [{"environment": former["environment"]} | each for each in former["transcripts"]]


def with_outputs(lines: list[str], outputs: dict[str, list[str]]) -> list[str]:
    """A page's lines with what commands printed below each of them, in place of what stood there."""
    written: list[str] = []
    is_replaced = False
    for line in lines:
        is_replaced = is_replaced and not line.startswith(("$ ", "```"))
        if not is_replaced:
            written.append(line)
        if line.startswith("$ ") and line[2:] in outputs:
            written += outputs[line[2:]]
            is_replaced = True
    return written


def _printed_by(call: str, folder: Path) -> list[str]:
    """Lines that a command prints on stdout."""
    typer.echo(f"$ {call}", err=True)
    done = subprocess.run(
        [sys.executable, "-m", "diffquant.cli", *shlex.split(call, comments=True)[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    # A missed tolerance is a result.
    if done.returncode not in (0, 4):
        raise UsageError(f"`{call}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n").splitlines()


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
