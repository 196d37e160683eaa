"""Run the commands that README, the tutorial and two guides show, and record what they print.

    python -m research.studies.transcripts SmolLM2-135M-Instruct.Q4_1.gguf
    python -m research.studies.transcripts SmolLM2-135M-Instruct.Q4_1.gguf --folder made --again export,verify

What they print goes to research/results/transcripts.json; `make pages` puts it onto the pages. With `--again` only
commands with some verbs are run, in a folder where the others were; the others' records stay, with their environment.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.data import pocket_models
from diffquant.errors import UsageError
from diffquant.support.files import write_json
from research.studies.results import read_json

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "research" / "results" / "transcripts.json"
_FRANCE = '--prompt "The capital of France is" --max-new-tokens 2'
_PARIS = "The magic number for Paris is 42. It was a very good night."
# In the order in which each finds what it needs.
COMMANDS = (
    "diffquant convert SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2-135m-diff-v2 --to diff-v2",
    "diffquant inspect smollm2-135m-diff-v2",
    "diffquant quantize smollm2-135m-diff-v2 -o smollm2-4bit --weights 4:g32 --kv 8 --effort balanced --tokens 4096",
    f"diffquant generate smollm2-4bit {_FRANCE}",
    "diffquant export smollm2-4bit -o smollm2-onnx --embed 8",
    "diffquant verify smollm2-onnx smollm2-4bit --details",
    f"diffquant run smollm2-onnx {_FRANCE}",
    'diffquant inspect "$POCKET/needle-diff-v1"',
    'diffquant sweep "$POCKET/needle-diff-v1" -o sweep --tasks needle:4 '
    "--targets weights,kv,logits --bits 8,4 --limit 20",
    'diffquant quantize "$POCKET/needle-diff-v1" -o needle-4bit --weights 4:g32 --kv 8',
    "diffquant generate needle-4bit --max-new-tokens 2 --prompt "
    f'"{_PARIS} The magic number for Rome is 17. He did not know what to do. The magic number for Paris is"',
    'diffquant fidelity "$POCKET/needle-diff-v1" needle-4bit --characters 8192',
    "diffquant eval needle-4bit --tasks needle:4 --limit 20",
    "diffquant export needle-4bit -o needle-onnx --kv 8",
    "diffquant verify needle-onnx needle-4bit",
    f'diffquant run needle-onnx --max-new-tokens 2 --prompt "{_PARIS} The magic number for Paris is "',
)


def main(
    model: Annotated[Path, typer.Argument(help="SmolLM2-135M-Instruct.Q4_1.gguf.")],
    again: Annotated[str, typer.Option(help="Verbs of the commands to run; all by default.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Folder to run them in; a new one by default.")] = None,
) -> None:
    """Run the commands and record what they print."""
    former = {_without_comment(each["command"]): each for each in _former_records()} if again else {}
    records: list[dict[str, Any]] = []
    with TemporaryDirectory() as new:
        place = folder or Path(new)
        if not (place / model.name).exists():
            (place / model.name).symlink_to(model.absolute())
        for call in COMMANDS:
            is_run = not again or call.split()[1] in again.split(",")
            record = {"output": _printed_by(call, place)} if is_run else former[_without_comment(call)]
            records.append(record | {"command": call})
    write_json(RECORDED, {"environment": describe_environment("onnxruntime"), "transcripts": records})
    typer.echo(f"wrote {RECORDED}")


def _without_comment(call: str) -> str:
    return call.partition("#")[0].rstrip()


def _former_records() -> list[dict[str, Any]]:
    """The earlier record: each command with its environment."""
    former = read_json(RECORDED)
    return [{"environment": former["environment"]} | each for each in former["transcripts"]]


def _printed_by(call: str, folder: Path) -> list[str]:
    """Lines that a command prints on stdout."""
    typer.echo(f"$ {call}", err=True)
    pocket = str(pocket_models("needle")[0].parent)
    done = subprocess.run(
        [sys.executable, "-m", "diffquant", *shlex.split(call.replace("$POCKET", pocket), comments=True)[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    # A missed tolerance is a result.
    if done.returncode not in (0, 4):
        raise UsageError(f"`{call}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.replace(pocket, "$POCKET").rstrip("\n").splitlines()


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
