"""Follow README.md and the first commands on four kinds of models as a newcomer does, and hold what they answer.

    python -m tests.walk [--folder FOLDER] [--only NAME...]

In a new environment with the wheel, on terminals of 80 columns: quantize, fidelity, export, verify and generate on the
small trained models, a random DiffLlama and a random Motif, then the commands of the tutorial and of README in order.
It fails where a command fails, prints something else than README shows, says nothing for more than five seconds, writes
a line that 80 columns do not hold, or answers wrongly: SmolLM2 says Paris, the trained model finds 42, `verify` says
PASS, and KL from 16 bits is below a bound. All commands and their answers are in FOLDER/transcript.txt.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diffquant.data import pocket_models, smollm2_file
from tests.support.checkpoints import write_checkpoint
from tests.support.watched import COLUMNS, Ran, run

ROOT = Path(__file__).parents[1]
LONGEST_SILENCE = 5.0
# Commands that are not run, by how they begin, and why.
ELSEWHERE = {
    "pip install": "the environment is made from the wheel",
    "diffquant serve": "make test-all ONLY=serving asks the server",
}
# Seconds and sizes of a transcript differ between machines and releases by little.
_NUMBERS = re.compile(r"\d[\d,.]*")
_KL = re.compile(r"^mean KL, nats\s+(\S+)", re.MULTILINE)
# Nats a token from the 16-bit model, at 4 bits with an 8-bit cache: what a model that still writes its text has.
_LARGEST_KL = 0.3


@dataclass
class Step:
    """A command of a page, and what the page shows below it (None if nothing)."""

    command: str
    shown: list[str] | None = None


def steps_of(page: str) -> Iterator[Step]:
    """Yield the commands of a page's shell blocks and transcripts, and its Python blocks as commands, in order."""
    for number, piece in enumerate(page.split("```")):
        language, _, body = piece.partition("\n")
        if number % 2 and language == "python":
            yield Step(f"python - <<'END'\n{body}END")
        elif number % 2 and language in ("sh", ""):
            yield from _steps_of_block(body, is_transcript="$ " in body[:2])


def _steps_of_block(body: str, is_transcript: bool) -> Iterator[Step]:
    step: Step | None = None
    for line in body.splitlines():
        if step is not None and step.command.endswith("\\"):
            step.command = step.command[:-1] + line.lstrip("> ")
        elif not is_transcript or line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(line.removeprefix("$ "), [] if is_transcript else None) if line.strip() else None
        elif step is not None and step.shown is not None:
            step.shown.append(line)
    if step is not None:
        yield step


def follow(steps: Sequence[Step], folder: Path, environment: dict[str, str]) -> int:
    """Run commands in a folder; return the number of faults, each of which is printed."""
    faults = 0
    for step in steps:
        name = step.command.partition("\n")[0]
        if why := next((why for start, why in ELSEWHERE.items() if step.command.startswith(start)), None):
            print(f"not here  {name}  ({why})", flush=True)
            continue
        ran = run(step.command, folder, environment)
        found = list(_faults(step, ran))
        with (folder.parent / "transcript.txt").open("a", encoding="utf-8") as transcript:
            transcript.write(f"$ {step.command}\n{ran.stdout}\n")
        print(f"{ran.seconds:6.1f} s  {name}")
        print(*(f"      ! {fault}\n" for fault in found), sep="", end="", flush=True)
        faults += len(found)
    return faults


def _faults(step: Step, ran: Ran) -> Iterator[str]:
    if ran.status:
        yield f"it ended with {ran.status}: {ran.stderr.strip()[-500:]}"
    if not step.command.startswith(("diffquant", "python - ")):
        return  # pip and the like speak as they speak
    if ran.silence > LONGEST_SILENCE:
        yield f"it said nothing for {ran.silence:.0f} s"
    widest = max(re.split(r"[\r\n]+", ran.stdout + "\n" + ran.stderr), key=len)
    if len(widest) > COLUMNS:
        yield f"a line has {len(widest)} columns: {widest}"
    if not _shows(step.shown or [], ran.stdout):
        yield f"README shows other words; it printed:\n{ran.stdout}"
    verb = step.command.split()[1]
    if verb in ("generate", "run") and "for Paris is 42" in step.command and "42" not in ran.stdout:
        yield f"it does not find 42 but says {ran.stdout!r}"
    if verb == "verify" and "PASS" not in ran.stdout:
        yield "verify does not say PASS"
    if "The capital of France is" in step.command and "Paris" not in ran.stdout:
        yield f"it does not say Paris but {ran.stdout!r}"
    if verb == "fidelity" and not (found := _KL.search(ran.stdout)):
        yield f"no KL: {ran.stdout}"
    elif verb == "fidelity" and found and float(found[1]) > _LARGEST_KL:
        yield f"KL is {found[1]}, more than {_LARGEST_KL}"


def _shows(shown: Sequence[str], stdout: str) -> bool:
    """Return whether the lines that README shows, but for their numbers, begin what a command printed."""
    words = [_NUMBERS.sub("#", line).rstrip() for line in shown if line != "..."]
    return [_NUMBERS.sub("#", line).rstrip() for line in stdout.splitlines()][: len(words)] == words


def first_commands(model: str) -> list[Step]:
    """Return what a newcomer tries on a model of their own."""
    made = model.replace("/", "-")
    return [
        Step(f"diffquant inspect {model}"),
        Step(f"diffquant quantize {model} -o {made}-4bit --kv 8"),
        Step(f"diffquant fidelity {model} {made}-4bit --characters 8192"),
        Step(f"diffquant generate {made}-4bit --prompt 'It was a very good night.' --max-new-tokens 8"),
        Step(f"diffquant export {made}-4bit -o {made}-onnx --embed 8"),
        Step(f"diffquant verify {made}-onnx {made}-4bit"),
        Step(f"diffquant run {made}-onnx --prompt 'It was a very good night.' --max-new-tokens 8"),
    ]


def new_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment with the wheel of this checkout and its extra `onnx`, first on the path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS", "LINES", "CI")}
    wheels = folder / "wheel"
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True, env=kept)
    (wheel,) = wheels.glob("*.whl")
    venv.create(folder / "environment", with_pip=True)
    pip[0] = str(folder / "environment/bin/python")
    for wanted in ("torch", f"{wheel}[onnx]"):
        install = [*pip, "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), wanted]
        subprocess.run(install, check=True, env=kept)
    return kept | {"PATH": f"{folder}/environment/bin:{os.environ['PATH']}", "TERM": "xterm-256color"}


def make_models(folder: Path) -> Iterator[str]:
    """Make models of the kinds that newcomers have, and yield their names."""
    trained = pocket_models("prose")
    for model in trained:
        (folder / model.name).symlink_to(model)
        yield model.name
    for kind in ("diffllama", "motif"):
        write_checkpoint(
            folder / kind, kind, torch.bfloat16, vocab_size=2048, hidden_size=64, max_position_embeddings=2048
        )
        for file in trained[0].glob("tokenizer*"):
            shutil.copy(file, folder / kind)
        yield kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow README and the first commands; return 1 if anything would have turned a newcomer away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/walk", help="made anew; build/walk by default")
    parser.add_argument(
        "--only", nargs="+", default=(), help="models, such as motif, tutorial or README; all by default"
    )
    given = parser.parse_args(arguments)
    folder = given.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    (home := folder / "home").mkdir(parents=True)
    environment = new_environment(folder)
    environment["POCKET"] = str(pocket_models("needle")[0].parent)
    parts = {model: first_commands(model) for model in make_models(home)}
    # Its first command sets POCKET.
    parts["tutorial"] = _steps_of_file("docs/tutorial.md")[1:]
    # A reader's own checkpoint, in README's second block.
    (home / "ORG").mkdir()
    convert = Step(f"diffquant convert {smollm2_file()} --output ORG/NAME --to diff-v2")
    parts["README"] = [convert, *_steps_of_file("README.md")]
    faults = sum(follow(parts[name], home, environment) for name in given.only or parts)
    print(f"{faults} faults" if faults else "nothing that would turn a newcomer away")
    return int(faults > 0)


def _steps_of_file(name: str) -> list[Step]:
    return list(steps_of((ROOT / name).read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
