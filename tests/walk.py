"""Walk README.md as a stranger does: a new environment, the wheel, a terminal of 80 columns, every command in order.

    python -m tests.walk [--folder FOLDER]

It prints how long each command took and fails where a command fails, states no duration or a wrong one, prints
something else than README shows, says nothing for more than five seconds, writes a line that 80 columns do not hold, or
"quantizes" to more bytes than 16 bits take. `ORG/NAME` is a folder of that name, which holds the DIFF model that README
converts.

A duration is held to the CPU seconds that a command takes, in the time of README's processor: README records how long a
loop took there, which is run here too. In silence only the time counts that no thread waited for a core. So neither
another processor nor other work beside the walk changes what it finds.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from diffquant.demo.smollm2 import gguf_file
from tests.support.watched import COLUMNS, Ran, loop_seconds, run

ROOT = Path(__file__).parents[1]
LONGEST_SILENCE = 5.0
# Commands that are not walked, by how they begin, and why.
ELSEWHERE = {
    "pip install": "the environment is made from the wheel",
    "git clone": "this is the clone",
    "make": "CI runs it",
    "diffquant serve": "make test-serving asks the server",
    "vllm serve": "make test-serving asks the server",
    "curl": "make test-serving asks the server",
}
# What differs between machines: seconds, speeds, and the bytes that a process took.
_MEASURED = re.compile(r"\b\d[\d,.]*(?= (?:s|min|h|ms|tokens/s|GB of memory)\b)|\d+:\d\d")
_NUMBER = re.compile(r"(\(?)(\d+\.\d+)(%?\)?[,.;]?)")
# A line of a list of tensors' errors.
_ERROR = re.compile(r"\s+\d+\.\d+%  \S")
# Units of numbers that are the same on every machine.
_SIZES = ("MB", "MB,", "GB", "GB,", "M", "stored", "bits", "of")
# A duration as README states it behind a command: # 20 s, # about 2 min, # 1 to 3 min.
_DURATION = re.compile(r"#.*?\b(?:(?P<least>\d+) to )?(?P<most>\d+) (?P<unit>s|min)\b")
# What README says of the loop on the machine whose durations it states, and cores that there are.
_LOOP = re.compile(r"<!-- The loop of tests/walk\.py took (\d+\.\d+) CPU seconds there\. -->")
_CORES = 2
# A stated duration is wrong if it is off by more than this factor.
_OFF = 2.5
# Seconds that may go by without the processor: files are read.
_BESIDE = 5


@dataclass
class Step:
    """A command of README, what README shows below it (None if nothing), and the line that it stands on."""

    line: int
    command: str
    shown: list[str] | None = None


def steps_of(page: str) -> Iterator[Step]:
    """The commands of a page's shell blocks and transcripts, and its Python blocks as commands, in order."""
    pieces, at = page.split("```"), 1
    for number, piece in enumerate(pieces):
        language, _, body = piece.partition("\n")
        if number % 2 and language == "python":
            yield Step(at + 1, f"python - <<'END'{_duration_in(body)}\n{body}END")
        elif number % 2 and language in ("sh", ""):
            yield from _steps_of_block(body, at + 1, is_transcript="$ " in body[:2])
        at += piece.count("\n")


def _steps_of_block(body: str, first: int, is_transcript: bool) -> Iterator[Step]:
    step: Step | None = None
    for number, line in enumerate(body.splitlines(), first):
        if step is not None and step.command.endswith("\\"):
            step.command = step.command[:-1] + line.lstrip("> ")
        elif not is_transcript or line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(number, line.removeprefix("$ "), [] if is_transcript else None) if line.strip() else None
        elif step is not None and step.shown is not None:
            step.shown.append(line)
    if step is not None:
        yield step


def _duration_in(body: str) -> str:
    found = _DURATION.search(body)
    return f"  {found[0]}" if found else ""


def walk(page: str, folder: Path, environment: dict[str, str]) -> int:
    """Run a page's commands in a folder; returns how many faults there were, each of which is printed."""
    faults = 0
    sizes: dict[str, int] = {}
    loop = _LOOP.search(page)
    slower = loop_seconds() / float(loop[1]) if loop else None
    if slower:
        print(f"this processor takes {slower:.1f} times as long as README's", flush=True)
    for step in steps_of(page):
        name = step.command.partition("\n")[0]
        if why := next((why for start, why in ELSEWHERE.items() if step.command.startswith(start)), None):
            print(f"{step.line:4}  not here  {name}  ({why})", flush=True)
            continue
        ran = run(step.command, folder, environment)
        found = [*_faults(step, ran, slower), *_larger(step.command, folder, sizes)]
        print(f"{step.line:4}  {ran.seconds:6.1f} s, {ran.cpu:6.1f} of CPU  {name}")
        print(*(f"      ! {fault}\n" for fault in found), sep="", end="", flush=True)
        faults += len(found)
    return faults


def _faults(step: Step, ran: Ran, slower: float | None) -> Iterator[str]:
    if ran.status:
        yield f"it ended with {ran.status}: {ran.stderr.strip()[-500:]}"
    stated = _DURATION.search(step.command.partition("\n")[0])
    if not stated:
        yield "README does not say how long it takes"
    if not step.command.startswith(("diffquant", "python - ")):
        return  # pip and the like speak as they speak
    if slower is None:
        yield "README does not say how long the loop of tests/walk.py took where its durations are from"
    elif stated and (wrong := misstated(stated, ran.cpu / slower)):
        yield wrong
    if ran.silence > LONGEST_SILENCE:
        yield f"it said nothing for {ran.silence:.0f} s"
    widest = max(re.split(r"[\r\n]+", ran.stdout + "\n" + ran.stderr), key=len)
    if len(widest) > COLUMNS:
        yield f"a line has {len(widest)} columns: {widest}"
    printed = ran.stdout.splitlines()
    if step.shown is not None and not says_the_same(step, printed):
        yield "README shows other lines; it printed:\n        " + "\n        ".join(printed)


def says_the_same(step: Step, printed: Sequence[str]) -> bool:
    """Whether a command printed what README shows, as far as two processors compute alike.

    They add float32 numbers in orders of their own: errors of rounding differ in their second digit, tensors of nearly
    one error change places in a list, and texts that a model writes part after some words, so that of these the first
    sentence counts. Counts and sizes are the same.
    """
    shown = step.shown or []
    if step.command.split()[1:2] in (["generate"], ["run"]):
        first, second = (" ".join(lines).partition(".")[0].split() for lines in (shown, printed))
        return first == second
    ours, others = words_of(_by_name(shown)), words_of(_by_name(printed))
    triples = zip_longest(ours, others, ours[1:], fillvalue="")
    return all(one == other or (unit not in _SIZES and _are_near(one, other)) for one, other, unit in triples)


def _by_name(lines: Sequence[str]) -> list[str]:
    """The lines, those of a list of errors in the order of the names behind them."""
    rows = iter(sorted((line for line in lines if _ERROR.match(line)), key=lambda line: line.split()[1:]))
    return [next(rows) if _ERROR.match(line) else line for line in lines]


def _are_near(one: str, other: str) -> bool:
    """Whether two words are fractions that differ by a tenth at most, with the same signs about them."""
    parts = [_NUMBER.fullmatch(word) for word in (one, other)]
    if None in parts:
        return False
    (before, number, after), (others_before, others, others_after) = (part.groups() for part in parts if part)
    return (before, after) == (others_before, others_after) and math.isclose(float(number), float(others), rel_tol=0.1)


def words_of(lines: Iterable[str]) -> list[str]:
    """The words of a text, wherever its lines end, without what is measured anew on each machine."""
    return _MEASURED.sub("…", " ".join(" ".join(lines).split())).split()


def misstated(stated: re.Match[str], cpu: float) -> str | None:
    """What is wrong with a stated duration of work that takes README's processor these CPU seconds; None if nothing is.

    On some cores that have nothing else to do, work takes at most its CPU seconds, and its part of them at least.
    """
    unit = {"s": 1, "min": 60}[stated["unit"]]
    least, most = (int(stated[end] or stated["most"]) * unit for end in ("least", "most"))
    if most * _OFF < cpu / _CORES or least > cpu * _OFF + _BESIDE:
        return (
            f"README says {stated['most']} {stated['unit']}, and it takes {cpu:.0f} CPU seconds of README's processor"
        )
    return None


def _larger(command: str, folder: Path, sizes: dict[str, int]) -> Iterator[str]:
    """The fault of a result that is larger than its model is at 16 bits, which `convert` writes."""
    words = command.split()
    if words[0] != "diffquant" or words[1] not in ("convert", "quantize", "export"):
        return
    source, output = words[2], _output_of(command)
    if not (folder / output).is_dir():
        return
    size = sum(file.stat().st_size for file in (folder / output).rglob("*") if file.is_file())
    if words[1] == "convert":
        sizes[output] = sizes["ORG/NAME"] = size
    elif source in sizes:
        sizes[output] = sizes[source]
        if size >= sizes[source]:
            yield f"{output} has {size:,} bytes, and 16 bits take {sizes[source]:,}"


def _output_of(command: str) -> str:
    found = re.search(r"(?:-o|--output)[ =](\S+)", command)
    return found[1] if found else ""


def new_environment(folder: Path) -> dict[str, str]:
    """A virtual environment with the wheel of this checkout and its extra `onnx`, first on the path."""
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


def put_model(folder: Path, environment: dict[str, str]) -> None:
    """Make ORG/NAME, a reader's own checkpoint: SmolLM2 as DIFF V2."""
    command = ["diffquant", "convert", str(gguf_file()), "--output", "ORG/NAME", "--to", "diff-v2"]
    (folder / "ORG").mkdir()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk README; returns 1 if anything would have turned a stranger away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/walk", help="made anew; build/walk by default")
    folder = parser.parse_args(arguments).folder
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    home.mkdir(parents=True)
    environment = new_environment(folder)
    put_model(home, environment)
    faults = walk((ROOT / "README.md").read_text(encoding="utf-8"), home, environment)
    print(f"{faults} faults" if faults else "nothing that would turn a stranger away")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
