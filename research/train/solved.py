"""Count the steps until each kind of model retrieves, over several seeds and on equal data.

    python -m research.train.solved research/train/solved.yaml --text books.txt --output runs/solved

Trains one model of each kind from each seed and asks it, every few steps, for the number of one city among N in
contexts that it was not trained on, until it answers nearly all of them or the settings' steps are over. Every run has
a folder, seed after seed. The same command goes on where it was interrupted, and with more `--steps` where runs ended
unsolved. `solved_report.py` has the table and the plot of a folder's runs.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.files import write_atomically
from diffquant.support.program import run_program
from diffquant.support.progress import progress_for
from research.train.loop import Trainer
from research.train.models import CONTROLS, KINDS
from research.train.needles import Needles
from research.train.settings import Settings
from research.train.solved_report import RETRIEVED, Run, last_step, report
from research.train.train import claim, interruptible, new_model, read_text

NEEDLES = (2, 4)
# Share of the questions that a model answers which has solved the task.
ENOUGH = 0.95
_EVERY = 50
_CONTEXTS = 200
# No training draws from this seed.
_HELD_OUT = 1_000_000

Questions = Sequence[tuple[list[int], int]]


def main(
    settings: Annotated[Path, typer.Argument(help="YAML file of the needle task, such as solved.yaml.")],
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked).")],
    output: Annotated[Path, typer.Option(help="Folder to make, or to go on in.")],
    characters: Annotated[int | None, typer.Option(help="Read only so many of the text; all by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Largest number of steps instead of the settings'.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0 on.")] = 5,
    kinds: Annotated[
        str, typer.Option(help="Kinds of models, with commas; all and their controls by default.")
    ] = ",".join((*KINDS, *CONTROLS)),
) -> None:
    """Count the steps until each kind of model retrieves."""
    chosen = [Settings.read(settings, steps, seed) for seed in range(seeds)]
    prose = read_text(text, characters)
    data = _needles_of(chosen[0], prose)
    digest = hashlib.sha256(prose.encode()).hexdigest()
    with interruptible(output):
        for each in chosen:
            for kind in kinds.split(","):
                run_until_solved(kind, each, data, digest, output)
    report(output)


def _needles_of(settings: Settings, prose: str) -> Needles:
    if settings.source != "needle" or len(settings.schedule.lengths) > 1 or settings.schedule.final != 1.0:
        raise UsageError(
            "steps are counted of source needle, with one length and `final: 1.0`: a run's number of steps must "
            "not decide what any step does"
        )
    return Needles(prose, settings.model.context, **settings.data)


def run_until_solved(kind: str, settings: Settings, data: Needles, digest: str, output: Path) -> Run:
    """Train one model, or go on, until it retrieves among each number of needles or its steps are over.

    Returns:
        what the run's retrieved.json holds: kind, seed, number of parameters, environment; `evaluations`, the share of
        questions answered for each N every 50 steps; and `solved`, the first of those steps at which an N's share
        reached `ENOUGH`, None if none did.

    Raises:
        UsageError: the folder holds a run of other settings or text.
    """
    schedule = settings.schedule
    folder = output / f"{kind}-seed-{schedule.seed}"
    described = asdict(settings)
    del described["schedule"]["steps"]
    claim(folder, {"kind": kind, "text": digest, **data.describe(), **described})
    run: Run = {
        "kind": kind,
        "seed": schedule.seed,
        "environment": describe_environment(),
        "evaluations": [],
        "solved": {},
    }
    if (folder / RETRIEVED).exists():
        run = json.loads((folder / RETRIEVED).read_text(encoding="utf-8"))
        if _is_over(run, schedule.steps):
            return run
    exam = {str(n): data.questions(_HELD_OUT, 0, _CONTEXTS, schedule.longest, n) for n in NEEDLES}
    model = new_model(settings, kind, len(data.tokenizer), "cpu")
    trainer, evaluations = Trainer(model, schedule, compiled=False), run["evaluations"]
    if not trainer.resume(folder):
        evaluations.clear()
    while not _is_over(run, schedule.steps):
        until = min(_EVERY * (len(evaluations) + 1), schedule.steps)
        trainer.train(data, folder, until, _EVERY, progress_for(folder.name))
        retrieved = {n: share_answered(model, questions) for n, questions in exam.items()}
        evaluations.append({"step": until, "retrieved": retrieved})
        run |= {"parameters": model.num_parameters(), "solved": {n: _first_solved(evaluations, n) for n in exam}}
        write_atomically(folder / RETRIEVED, json.dumps(run, indent=1) + "\n")
    return run


def _is_over(run: Run, steps: int) -> bool:
    return bool(run["evaluations"]) and (last_step(run) >= steps or None not in run["solved"].values())


def _first_solved(evaluations: Sequence[Mapping[str, Any]], n: str) -> int | None:
    return next((each["step"] for each in evaluations if each["retrieved"][n] >= ENOUGH), None)


@torch.inference_mode()
def share_answered(model: DiffTransformer, questions: Questions) -> float:
    """Share of questions whose number is the likeliest next token."""
    right = 0
    for length in {len(prompt) for prompt, _ in questions}:
        alike = [(prompt, number) for prompt, number in questions if len(prompt) == length]
        logits = model(torch.tensor([prompt for prompt, _ in alike]), use_cache=False).logits[:, -1]
        right += int((logits.argmax(-1) == torch.tensor([number for _, number in alike])).sum())
    return right / len(questions)


if __name__ == "__main__":
    run_program(main)
