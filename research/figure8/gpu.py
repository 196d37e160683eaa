"""E8 of protocol.md: nine trainings of 16 million parameters side by side on one GPU, then scored there.

    make figure8-gpu TEXT=FILE         # or: python -m research.figure8.gpu --text FILE

Each training has a CUDA stream, and their steps are queued in turn. The same command goes on where it was interrupted;
checkpoints and models lie under build/figure8. Nothing else is needed than this project's packages and the text.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from diffquant.errors import DiffQuantError, NonFiniteError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.devices import check_device
from diffquant.support.progress import progress_for
from research.figure8.plan import EXPONENT, KINDS, RESULTS, SIZES, SMALL_TOKENS, TOKENS_PER_STEP, best_rate, results
from research.figure8.ranges import read_lengths
from research.figure8.record import environments, losses, weights_digest, write_result
from research.figure8.run import BUILD
from research.figure8.scoring import scores, validation
from research.figure8.text import TrainingText
from research.train.loop import CHECKPOINT, LOG, Trainer
from research.train.models import matched
from research.train.settings import Schedule
from research.train.train import claim, interruptible, read_text

SEEDS = range(201, 204)
SIZE = "16M"
STEPS, LENGTH = 1500, 1024
# Tokens of a pass, and passes of a step.
TOKENS, PASSES = 16384, 2
EVERY = 250
ARITHMETIC = "bf16-autocast"


def main(
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked); its digest is recorded.")],
    device: Annotated[str, typer.Option(help="Device of trainings and scores.")] = "cuda",
    together: Annotated[int, typer.Option(help="Trainings side by side: fewer take less memory.")] = 9,
    minutes: Annotated[float, typer.Option(help="Stop at checkpoints after so long.")] = 25.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the raw files.")] = RESULTS,
) -> None:
    """Train E8's nine models, score them and write their raw files."""
    until = time.monotonic() + 60 * minutes
    check_device(device)
    if together < 1:
        raise UsageError(f"{together} trainings side by side train nothing; give 1 or more")
    batches = TrainingText(read_text(text, None), BUILD)
    there = results(output)
    left = [job for job in jobs(there) if job.name not in there]
    if not left:
        raise UsageError(f"{output} has the raw files of all trainings of E8")
    with interruptible(BUILD):
        for first in range(0, len(left), together):
            side_by_side([_Training(job, batches, device) for job in left[first : first + together]], until)
    for job in left:
        print(score(job, batches, device, output))


@dataclass(frozen=True)
class Job:
    """A training of E8."""

    kind: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        """Name of its raw file."""
        return f"e8-{self.kind}-seed-{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of its checkpoint and model."""
        return BUILD / self.name

    @property
    def schedule(self) -> Schedule:
        """Its schedule."""
        warmup = min(100, STEPS // 3)
        return Schedule(STEPS, warmup, TOKENS, ((0.0, LENGTH),), self.rate, accumulate=PASSES, seed=self.seed)


def jobs(there: Mapping[str, Any]) -> list[Job]:
    """Make the list of trainings, by seed, at rates that E1's raw files decide.

    Raises:
        UsageError: a raw file that decides is missing.
    """
    rates = {kind: best_rate(kind, there) or best_rate(kind, results(RESULTS)) for kind in KINDS}
    if missing := [kind for kind, rate in rates.items() if rate is None]:
        raise UsageError(f"{RESULTS} lacks trainings of E1 that decide the rate of {', '.join(missing)}")
    return [Job(kind, seed, round((rates[kind] or 0.0) * carry(), 6)) for seed in SEEDS for kind in KINDS]


def carry() -> float:
    """Factor from the best rate of the small models: by tokens, by width, and by the root of the tokens in a step."""
    step = TOKENS * PASSES
    fewer = (STEPS * step / SMALL_TOKENS) ** EXPONENT
    narrower: float = SIZES["1.25M"].hidden / SIZES[SIZE].hidden
    return float(fewer * narrower * math.sqrt(step / TOKENS_PER_STEP))


def new_model(job: Job, vocabulary: int, device: str) -> DiffTransformer:
    """Make a model of random weights that depend on the kind and the seed, in float32."""
    torch.manual_seed(job.seed)
    model = DiffTransformer(matched(job.kind, SIZES[SIZE], vocabulary))
    for attention in model.attention_modules:
        # Plain PyTorch, with values cut to the keys' width, which is what its fast kernels take.
        attention.backend = "flashdiff2"
    model.to(device)
    return model


class _Training(Trainer):
    """A training whose steps are queued on a stream; losses stay on the device until they are logged."""

    def __init__(self, job: Job, batches: TrainingText, device: str) -> None:
        self.job, self._batches, self._device = job, batches, device
        model = new_model(job, len(batches.tokenizer), device)
        claim(job.folder, record_of(job, model, batches))
        self.environment = environments(job.folder)
        super().__init__(model, job.schedule, False)
        self._recent: list[Any] = []
        self._stream = torch.cuda.Stream(device) if device.startswith("cuda") else None
        if not self.resume(job.folder):
            (job.folder / LOG).unlink(missing_ok=True)

    @property
    def is_done(self) -> bool:
        """Whether all steps are made or the loss has left the finite numbers."""
        return self.step >= self.schedule.steps or (self.job.folder / "diverged").exists()

    def advance(self) -> None:
        """Queue a step; every `EVERY` steps, and at the end, log and save."""
        with self.queued():
            loss, _ = self._advance(self._batches)
            self._recent.append(loss)
            if self.step % EVERY == 0 or self.step >= self.schedule.steps:
                self.keep()

    def keep(self) -> None:
        """Write the losses since the last time and the checkpoint; a loss that is not finite ends the training."""
        losses = [float(loss) for loss in self._recent]
        self._recent = []
        if not all(map(math.isfinite, losses)):
            (self.job.folder / "diverged").write_text(f"the loss before step {self.step} is not finite\n")
            return
        if losses:
            self._log(self.job.folder, losses, 0.0)
        if self.step >= self.schedule.steps:
            self.model.save_pretrained(self.job.folder / "model")
        # Last, so that a run that ends on the way makes these steps again.
        self.save(self.job.folder)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Queue what happens inside on the training's stream."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _differentiate(self, ids: Tensor, weights: Tensor) -> Any:
        """Leave a pass's gradients in the model; returns its loss where it is, so that nothing waits for it."""
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16):
            loss = self._loss(ids, weights)
        loss.backward()
        return loss.detach()


def side_by_side(trainings: list[_Training], until: float) -> None:
    """Train to the end, a step of each in turn.

    Raises:
        DiffQuantError: the time is up; checkpoints are kept.
    """
    progress = progress_for("figure8-gpu")
    if torch.cuda.is_available():
        # Weights were made on another stream than they are trained on.
        torch.cuda.synchronize()
    while running := [training for training in trainings if not training.is_done]:
        for training in running:
            training.advance()
        done = sum(training.step for training in trainings)
        progress(done, len(trainings) * STEPS, f"step {running[0].step}")
        if time.monotonic() > until and any(not training.is_done for training in trainings):
            for training in running:
                with training.queued():
                    training.keep()
            raise DiffQuantError(f"the time is up at step {running[0].step}; the same command goes on")


def record_of(job: Job, model: DiffTransformer, batches: TrainingText) -> dict[str, Any]:
    """Describe a training, for its raw file."""
    return {
        "run": job.name,
        "kind": job.kind,
        "size": SIZE,
        "parameters": model.num_parameters(),
        "steps": STEPS,
        "tokens": STEPS * TOKENS * PASSES,
        "rate": job.rate,
        "seed": job.seed,
        "arithmetic": ARITHMETIC,
        "training_text": batches.describe(),
    }


def score(job: Job, batches: TrainingText, device: str, output: Path) -> Path:
    """Score a finished training and write its raw file; returns the file."""
    folder = job.folder
    if (folder / "diverged").exists():
        model = new_model(job, len(batches.tokenizer), device)
        said = (folder / "diverged").read_text().strip()
        record = record_of(job, model, batches) | {"diverged": said, "validation": {"nll": None, "perplexity": None}}
        return write_result(record | environments(folder) | {"losses": losses(folder / LOG)}, output)
    model = DiffTransformer.from_pretrained(folder / "model", dtype=torch.float32).to(device)
    record = record_of(job, model, batches) | environments(folder)
    try:
        record |= {"validation": validation(model, batches.held_out), "weights": weights_digest(model)}
    except NonFiniteError as error:
        record |= {"diverged": str(error), "validation": {"nll": None, "perplexity": None}}
    else:
        record |= scores(model, batches.tokenizer, progress_for(job.name))
        record |= {"range_by_length": read_lengths(model, batches.tokenizer)}
    file = write_result(record | {"losses": losses(folder / LOG)}, output)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return file


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
