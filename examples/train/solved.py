"""Count the steps until each kind of model retrieves, over several seeds and on equal data.

    python examples/train/solved.py examples/train/solved.yaml --text books.txt --output runs/solved

Trains one model of each kind from each seed and asks it, every few steps, for the number of one city among N in
contexts that it was not trained on, until it answers nearly all of them or the settings' steps are over. Each run is a
file of the output folder, seed after seed; those that are there are not made again. The plot shows every run.
"""

import hashlib
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from loop import LOG, Trainer
from models import KINDS
from needles import Needles
from settings import Settings
from solved_plot import write_plot
from train import new_model, read_text

from diffquant.bench.environment import environment
from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.report.tables import aligned
from diffquant.support.files import write_atomically
from diffquant.support.program import run_program
from diffquant.support.progress import progress_for

NEEDLES = (2, 4)
# Share of the questions that a solved task's model answers.
ENOUGH = 0.95
_EVERY = 50
_CONTEXTS = 200
# No training draws from this seed.
_HELD_OUT = 1_000_000

Run = Mapping[str, Any]
Questions = Mapping[int, Sequence[tuple[list[int], int]]]


def main(
    settings: Annotated[Path, typer.Argument(help="YAML file of the needle task, such as solved.yaml.")],
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked).")],
    output: Annotated[Path, typer.Option(help="Folder to make, or to go on in.")],
    characters: Annotated[int | None, typer.Option(help="Read only so many of the text; all by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Largest number of steps instead of the settings'.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.")] = 5,
) -> None:
    """Count the steps until each kind of model retrieves."""
    prose = read_text(text, characters)
    chosen = [Settings.read(settings, steps, seed) for seed in range(seeds)]
    data = _needles_of(chosen[0], prose)
    digest = hashlib.sha256(prose.encode()).hexdigest()
    output.mkdir(parents=True, exist_ok=True)
    runs = [_run_of(kind, each, data, digest, output) for each in chosen for kind in KINDS]
    print(solved_summary(runs))
    write_plot(runs, output / "solved.png")


def _needles_of(settings: Settings, prose: str) -> Needles:
    if settings.source != "needle":
        raise UsageError(f"the settings' source is {settings.source!r}; steps are counted of needle")
    return Needles(prose, settings.model.context, **settings.data)


def _run_of(kind: str, settings: Settings, data: Needles, digest: str, output: Path) -> Run:
    """Run of a kind and seed, made or read.

    Raises:
        UsageError: the folder holds one of other settings or text.
    """
    file = output / f"{kind}-seed-{settings.schedule.seed}.json"
    described = json.loads(json.dumps({"kind": kind, "text": digest, **asdict(settings)}))
    if not file.exists():
        run = described | steps_until_solved(kind, settings, data) | {"environment": environment()}
        write_atomically(file, json.dumps(run, indent=1) + "\n")
    stored: Run = json.loads(file.read_text(encoding="utf-8"))
    if differing := [key for key, value in described.items() if stored.get(key) != value]:
        raise UsageError(f"{file} is a run of other {', '.join(differing)}; choose another output")
    return stored


def steps_until_solved(kind: str, settings: Settings, data: Needles) -> dict[str, Any]:
    """Train one model until it retrieves among each number of needles.

    Returns:
        the number of parameters; the loss and the share retrieved of each N, every 50 steps; and `solved`, the first
        of those steps at which the share of an N reached `ENOUGH`, None where none did.
    """
    schedule = settings.schedule
    exam = {n: data.questions(_HELD_OUT, 0, _CONTEXTS, schedule.longest, n) for n in NEEDLES}
    model = new_model(settings, kind, len(data.tokenizer), "cpu")
    trainer, evaluations = Trainer(model, schedule, compiled=False), list[dict[str, Any]]()
    solved: dict[int, int | None] = dict.fromkeys(NEEDLES)
    with tempfile.TemporaryDirectory() as folder:
        while trainer.step < schedule.steps and None in solved.values():
            progress = progress_for(f"{kind} seed {schedule.seed}")
            trainer.train(data, Path(folder), trainer.step + _EVERY, _EVERY, progress)
            retrieved = {n: share_answered(model, questions) for n, questions in exam.items()}
            solved = {
                n: trainer.step if step is None and retrieved[n] >= ENOUGH else step for n, step in solved.items()
            }
            loss = json.loads((Path(folder) / LOG).read_text(encoding="utf-8").splitlines()[-1])["loss"]
            evaluations.append({"step": trainer.step, "loss": loss, "retrieved": retrieved})
    return {"parameters": model.num_parameters(), "evaluations": evaluations, "solved": solved}


@torch.inference_mode()
def share_answered(model: DiffTransformer, questions: Sequence[tuple[list[int], int]]) -> float:
    """Share of questions whose number is the likeliest next token."""
    right = 0
    for length in {len(prompt) for prompt, _ in questions}:
        alike = [(prompt, number) for prompt, number in questions if len(prompt) == length]
        logits = model(torch.tensor([prompt for prompt, _ in alike]), use_cache=False).logits[:, -1]
        right += int((logits.argmax(-1) == torch.tensor([number for _, number in alike])).sum())
    return right / len(questions)


def solved_summary(runs: Sequence[Run]) -> str:
    """Table of each kind's median and range of steps over its runs."""
    head = ["kind", "N", "runs", "solved", "median", "least", "most"]
    lines = []
    for kind in KINDS:
        of_kind = [run for run in runs if run["kind"] == kind]
        for needles in map(str, NEEDLES):
            steps = [run["solved"][needles] or float("inf") for run in of_kind]
            limit = of_kind[0]["schedule"]["steps"]
            figures = [
                f"> {limit}" if step == float("inf") else f"{step:.0f}"
                for step in (statistics.median(steps), min(steps), max(steps))
            ]
            lines.append(
                [kind, needles, str(len(steps)), str(sum(map(bool, map(float("inf").__gt__, steps)))), *figures]
            )
    return "\n".join(aligned(head, lines, names=2))


if __name__ == "__main__":
    run_program(main)
