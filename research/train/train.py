"""Train one model of a matched set from text.

    python -m research.train.train research/train/needle.yaml --kind diff-v1 --text books.txt --output runs/needle-v1

The same command again goes on from the last checkpoint. The output folder gets the checkpoint in 16 bits with
its tokenizer, which every diffquant command takes, the settings, and a log with a line every few steps.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffquant.errors import OutputExistsError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.devices import check_device
from diffquant.support.files import write_atomically
from diffquant.support.program import run_program
from diffquant.support.progress import progress_for
from research.train.fast import FastLoss
from research.train.loop import LOG, Batches, Trainer
from research.train.models import CONTROLS, GATED, KINDS, NO_NORM, look_back, matched, place
from research.train.needles import Needles
from research.train.prose import Prose
from research.train.settings import Settings

DATA = {"needle": Needles, "prose": Prose}
RUN = "training.json"


def main(
    settings: Annotated[Path, typer.Argument(help="YAML file, such as needle.yaml beside this program.")],
    kind: Annotated[str, typer.Option(help=f"Kind of model: {', '.join((*KINDS, *CONTROLS, GATED, NO_NORM))}.")],
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked).")],
    output: Annotated[Path, typer.Option(help="Folder to make, or to go on in.")],
    characters: Annotated[int | None, typer.Option(help="Read only so many of the text; all by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of the settings'.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data instead of the settings'.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    arithmetic: Annotated[
        str, typer.Option(help="On a CPU: float32, or bf16, which is faster, most of all with AVX-512 BF16.")
    ] = "float32",
) -> None:
    """Train one model of a matched set."""
    with interruptible(output):
        train(Settings.read(settings, steps, seed), kind, text, output, characters, device, arithmetic)


@contextmanager
def interruptible(output: Path) -> Iterator[None]:
    """Say how to go on where Ctrl-C ends a run that leaves checkpoints in a folder."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; the same command goes on from the last checkpoint in {output}") from None


def train(
    settings: Settings,
    kind: str,
    text: Path,
    output: Path,
    characters: int | None = None,
    device: str = "cpu",
    arithmetic: str = "float32",
) -> None:
    """Train, or go on training, into a folder.

    Raises:
        UsageError: settings, text or device cannot be, or the folder holds another run.
        OutputExistsError: the folder holds something else.
    """
    check_device(device)
    prose = read_text(text, characters)
    batches = make_batches(settings, prose)
    # Raises where the text is too short, before the folder is this run's.
    batches.batch(settings.schedule.seed, 0, 1, settings.schedule.longest)
    model = new_model(settings, kind, len(batches.tokenizer), device)
    digest = hashlib.sha256(prose.encode()).hexdigest()
    run = {"kind": kind, "parameters": model.num_parameters(), "text": digest, **batches.describe(), **asdict(settings)}
    # Another arithmetic is another run; what was begun before there were two of them goes on.
    run |= {} if arithmetic == "float32" else {"arithmetic": arithmetic}
    objective = objective_of(model, arithmetic, device)
    claim(output, run)
    trainer = Trainer(model, settings.schedule, device.startswith("cuda"), objective)
    if not trainer.resume(output):
        (output / LOG).unlink(missing_ok=True)
    trainer.train(batches, output, progress=progress_for(f"train {kind}"))
    # A shipped model is 16-bit, whatever it was trained in.
    model.to(torch.bfloat16).save_pretrained(output)
    batches.tokenizer.save_pretrained(output)


def make_batches(settings: Settings, text: str) -> Batches:
    """Training data that the settings name, made of a text.

    Raises:
        UsageError: the settings name no data, or its arguments are wrong.
    """
    if settings.source not in DATA:
        raise UsageError(f"unknown source {settings.source!r}; known are {', '.join(DATA)}")
    try:
        return DATA[settings.source](text, settings.model.context, **settings.data)
    except TypeError as error:
        raise UsageError(f"data of source {settings.source}: {error}") from error


def new_model(settings: Settings, kind: str, vocabulary: int, device: str) -> DiffTransformer:
    """Model of random weights that depend on the seed, in bfloat16 on CUDA."""
    torch.manual_seed(settings.schedule.seed)
    model = DiffTransformer(matched(kind, settings.model, vocabulary))
    if settings.model.look_back:
        look_back(model)
    if device == "cpu":
        for attention in model.attention_modules:
            # Half the calls of `auto`, which are what costs at this size.
            attention.backend = "flashdiff1"
        return model
    return place(model, device, torch.bfloat16)


def objective_of(model: DiffTransformer, arithmetic: str, device: str = "cpu") -> FastLoss | None:
    """The loss that `Trainer` differentiates: "bf16" by fused kernels, or None for the model's own forward.

    Raises:
        UsageError: the arithmetic is unknown, or this machine or model is not one for it.
    """
    if arithmetic not in ("float32", "bf16"):
        raise UsageError(f"unknown arithmetic {arithmetic!r}; known are float32, bf16")
    if arithmetic == "bf16" and device != "cpu":
        raise UsageError("--arithmetic is for CPUs; on CUDA models train in bfloat16 anyway")
    return FastLoss(model) if arithmetic == "bf16" else None


def read_text(path: Path, characters: int | None) -> str:
    """First characters of a UTF-8 file, packed with xz or not.

    Raises:
        UsageError: the file cannot be read or holds no text.
    """
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            text = file.read() if characters is None else file.read(characters)
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise UsageError(f"cannot read text from {path}: {error}") from error
    if not text.strip():
        raise UsageError(f"{path} is empty; give a text with prose in it")
    return text


def claim(output: Path, run: dict) -> None:
    """Make the folder this run's, or check that it is.

    Raises:
        UsageError: the folder holds another run.
        OutputExistsError: the folder holds something else.
    """
    described = json.dumps(run, indent=1) + "\n"
    note = output / RUN
    if note.exists():
        if note.read_text(encoding="utf-8") != described:
            raise UsageError(f"{output} holds a run of other settings or text; choose another output")
        return
    if output.exists() and any(output.iterdir()):
        raise OutputExistsError(f"{output} exists and holds no training run; choose another output")
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(note, described)


if __name__ == "__main__":
    run_program(main)
