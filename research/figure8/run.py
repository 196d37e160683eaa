"""Train a run of runs.md, score it, and write its raw file.

    python -m research.figure8.run --next --text FILE      # the first run without a raw file that can begin
    python -m research.figure8.run NAME --text FILE

One thread. The same command goes on where it was interrupted, and two of them do not take the same run. Checkpoints and
the trained model lie under build/figure8; the raw file alone is worth committing.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from filelock import FileLock, Timeout

from diffquant.errors import DiffQuantError, NonFiniteError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.progress import progress_for
from research.figure8.plan import (
    EQUALIZED,
    LARGEST,
    NO_FIRST,
    OTHER_ARITHMETIC,
    READ,
    RESULTS,
    RUNS,
    SIZES,
    TOKENS_PER_STEP,
    Result,
    Run,
    listed,
    rate_of,
    results,
    upcoming,
)
from research.figure8.ranges import Trajectory, marks, read_lengths
from research.figure8.record import environments, losses, weights_digest, write_result
from research.figure8.scoring import caches, scores, validation
from research.figure8.text import TrainingText, WithoutFirst
from research.figure8.tuning import base_folder, load_base, loss_of, tuned_scores
from research.train.equalized import equalize
from research.train.kernels import is_supported
from research.train.loop import CHECKPOINT, LOG, Trainer
from research.train.models import matched
from research.train.train import claim, interruptible, objective_of, read_text

BUILD = Path(__file__).parents[2] / "build" / "figure8"
# Steps between checkpoints, and losses averaged in a line of the log.
EVERY = 100
# Large blocks stay the process's own instead of being mapped and returned again and again.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "8000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_NUM_THREADS": "1",
}


def main(
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked); its digest is recorded.")],
    name: Annotated[str | None, typer.Argument(help="Run of runs.md.")] = None,
    following: Annotated[bool, typer.Option("--next", help="Take the first run that can begin.")] = False,
    minutes: Annotated[float, typer.Option(help="Stop at a checkpoint after so long.")] = 130.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the raw files.")] = RESULTS,
) -> None:
    """Train a run, score it and write its raw file."""
    if (name is None) != following:
        raise UsageError("give the name of a run, or --next")
    until = time.monotonic() + 60 * minutes
    with claimed(name, output) as run:
        file = train_and_score(run, text, output, until)
    print(file)


@contextmanager
def claimed(name: str | None, output: Path) -> Iterator[Run]:
    """Keep a run to this process: the named one, or the first that can begin and that no other process has.

    Raises:
        UsageError: the run has a raw file, has no rate yet or is another process's; or none is left.
    """
    there = results(output)
    candidates = upcoming(there) if name is None else [run for run in listed() if run.name == name]
    if name is not None and not candidates:
        raise UsageError(f"{RUNS} has no run {name!r}")
    if name in there:
        raise UsageError(f"{name} has a raw file in {output} already")
    if name is not None and rate_of(candidates[0], there) is None:
        raise UsageError(f"the trainings that decide the rate of {name}, or whether it is needed, are not there yet")
    BUILD.mkdir(parents=True, exist_ok=True)
    for run in candidates:
        if name is None and run.begins_trained and not base_folder(run, BUILD).exists():
            continue
        try:
            held = FileLock(BUILD / f"{run.name}.lock").acquire(timeout=0)
        except Timeout:
            continue
        with held:
            # The process that had it may have ended since the folder was read.
            if run.name not in results(output):
                yield run
                return
    raise UsageError("every run that can begin has a raw file or is another process's")


def train_and_score(run: Run, text: Path, output: Path, until: float) -> Path:
    """Train a run, or go on, and write its raw file; returns the file.

    Raises:
        UsageError: the folder has raw files of another text or arithmetic.
        DiffQuantError: the time is up; the checkpoint is kept.
    """
    torch.set_num_threads(1)
    there = results(output)
    rate = rate_of(run, there)
    batches = TrainingText(read_text(text, None), BUILD)
    model, base = load_base(run, BUILD, there) if run.begins_trained else (new_model(run, len(batches.tokenizer)), {})
    arithmetic = run.arithmetic if is_supported() else "float32"
    record = {
        "run": run.name,
        "kind": run.kind,
        "size": run.size,
        "parameters": model.num_parameters(),
        "steps": run.steps,
        "tokens": run.steps * TOKENS_PER_STEP,
        "rate": rate,
        "seed": run.seed,
        "arithmetic": arithmetic,
        "training_text": batches.describe(),
    }
    record |= {"base": base, "tuned_at": run.tuned_at} if run.begins_trained else {}
    check_fits(run, record, there)
    folder = BUILD / run.name
    claim(folder, record)
    record |= environments(folder)
    try:
        with interruptible(folder):
            train(run, rate or 0.0, model, batches, arithmetic, folder, until)
        record |= {"validation": validation(model, batches.held_out[:, run.variant == NO_FIRST :])}
    except NonFiniteError as error:
        record |= {"diverged": str(error), "validation": {"nll": None, "perplexity": None}}
    else:
        record |= {"weights": weights_digest(model)}
        record |= measure(run, model, batches, folder)
        model.save_pretrained(folder / "model")
        batches.tokenizer.save_pretrained(folder / "model")
    record |= {"losses": losses(folder / LOG)}
    file = write_result(record, output)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return file


def check_fits(run: Run, record: Result, there: Mapping[str, Result]) -> None:
    """Check, before it is trained, that a run can be compared with those that are there.

    Raises:
        UsageError: it cannot.
    """
    if texts := {each["training_text"]["sha256"] for each in there.values()} - {record["training_text"]["sha256"]}:
        raise UsageError(f"the raw files are of another text, of SHA-256 {texts.pop()}: give it, or another --output")
    # A model that is only read was trained elsewhere.
    trained = [each for name, each in there.items() if each["steps"] and not name.startswith(OTHER_ARITHMETIC)]
    usual = {each["arithmetic"] for each in trained}
    if run.arithmetic == "bf16" and usual - {record["arithmetic"]}:
        raise UsageError(
            f"the raw files are of {usual.pop()}, and this processor would train in {record['arithmetic']}: use one "
            "like theirs, or another --output"
        )


def new_model(run: Run, vocabulary: int) -> DiffTransformer:
    """Model of random weights that depend on the run's kind, size and seed."""
    torch.manual_seed(run.seed)
    model = DiffTransformer(matched(run.architecture, SIZES[run.size], vocabulary))
    if run.kind.endswith(EQUALIZED):
        equalize(model, LARGEST)
    return model


def train(
    run: Run, rate: float, model: DiffTransformer, batches: TrainingText, arithmetic: str, folder: Path, until: float
) -> None:
    """Train to the end, from the folder's checkpoint on if it has one."""
    objective = loss_of(run, model) if run.tuned_at else objective_of(model, arithmetic)
    trainer = Trainer(model, run.schedule(rate), False, objective)
    if not trainer.resume(folder):
        (folder / LOG).unlink(missing_ok=True)
    trajectory = Trajectory(folder, batches.tokenizer)
    stops = marks(run.steps) if run.records_ranges else []
    progress, every = progress_for(run.name), run.steps // 3 if run.tuned_at else EVERY

    def of_all(step: float, _: float, said: str) -> None:
        progress(step, run.steps, said)

    while True:
        if trainer.step in stops:
            trajectory.record(trainer.step, model)
        if trainer.step >= run.steps:
            return
        if time.monotonic() > until:
            raise DiffQuantError(f"{run.name}: the time is up at step {trainer.step}; the same command goes on")
        following = [step for step in (*stops, (trainer.step // every + 1) * every) if step > trainer.step]
        trainer.train(
            WithoutFirst(batches) if run.variant == NO_FIRST else batches,
            folder,
            until=min(following),
            every=every,
            progress=of_all,
        )


def measure(run: Run, model: DiffTransformer, batches: TrainingText, folder: Path) -> dict[str, Any]:
    """Measure what the protocol asks for of a trained model."""
    progress = progress_for(run.name)
    if run.tuned_at:
        return tuned_scores(model, batches.tokenizer, batches.held_out, progress)
    if run.variant == READ:
        return {"range_by_length": read_lengths(model, batches.tokenizer)}
    found = scores(model, batches.tokenizer, progress)
    if run.name.startswith("e3-") and run.rule == "checked":
        found |= {"caches": caches(model, batches.tokenizer)}
    if run.records_ranges:
        found |= {"range_by_step": Trajectory(folder, batches.tokenizer).recorded()}
        found |= {"range_by_length": read_lengths(model, batches.tokenizer)}
    return found


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):
        # The allocator reads them when a process begins.
        arguments = [sys.executable, "-m", "research.figure8.run", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | _ENVIRONMENT)
    from diffquant.support.program import run_program

    run_program(main)
