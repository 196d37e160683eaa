"""Continue a Transformer, and the DIFF V1 and DIFF V2 made of it, on the same tokens.

    python -m research.train.pairs train --text books.txt --output runs/pairs --device cuda
    python -m research.train.pairs apply runs/pairs/diff-v1/delta.safetensors SmolLM2-135M.gguf smollm2-diff-v1

Attention alone trains, so that a file of a few bits a weight turns the base into the trained model: `apply` makes the
checkpoint that every diffquant command takes. The same command again goes on from the last checkpoint.
"""

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffquant.checkpoints.atomic_folder import check_output, stage_output
from diffquant.checkpoints.source import Source, open_source
from diffquant.data import smollm2_file
from diffquant.errors import CheckpointError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.reports.tables import align_columns
from diffquant.support.devices import check_device
from diffquant.support.files import write_atomically
from diffquant.support.program import exit_codes
from research.train.deltas import applied, check_groups, read_delta
from research.train.loop import Batches
from research.train.models import KINDS
from research.train.settings import PairsSettings
from research.train.starts import levels_of
from research.train.three import Exam, Limit, Results, Trio, continue_one, planned_steps
from research.train.tokens import TokenWindows, check_length
from research.train.train import claim, interruptible, read_text

RESULTS = "results.json"
SETTINGS = Path(__file__).with_name("pairs.yaml")


commands = typer.Typer(
    help="Continue a Transformer and DIFF models made of it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@commands.command("train")
def train_command(
    text: Annotated[Path, typer.Option(help="English prose, UTF-8 (.xz is unpacked).")],
    output: Annotated[Path, typer.Option(help="Folder to make, or to go on in.")],
    base: Annotated[
        Path | None, typer.Option(help="A Llama, folder or .gguf; the wheel's SmolLM2-135M by default.")
    ] = None,
    settings: Annotated[Path, typer.Option(help="YAML file.")] = SETTINGS,
    minutes: Annotated[float, typer.Option(help="Minutes for all of the command.")] = 24.0,
    steps: Annotated[int | None, typer.Option(help="Steps of each model, instead of what the minutes allow.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Train all three, or go on."""
    with interruptible(output):
        limit = Limit(minutes, steps)
        print(results_table(train(PairsSettings.read(settings), base or smollm2_file(), text, output, limit, device)))


@commands.command("apply")
def apply_command(
    delta: Annotated[Path, typer.Argument(help="A delta.safetensors that training wrote.")],
    base: Annotated[Path, typer.Argument(help="The model that it was trained from.")],
    output: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> None:
    """Make the trained checkpoint of a delta and its base."""
    apply(delta, base, output)
    print(inspect_checkpoint(output))


def train(settings: PairsSettings, base: Path, text: Path, output: Path, limit: Limit, device: str = "cpu") -> Results:
    """Train the three models, or go on training them, into a folder; returns what `results.json` holds then.

    Raises:
        DiffQuantError: settings, base, text or device cannot be, the folder holds another run, or time is too short.
    """
    began = time.monotonic()
    check_device(device)
    if unknown := set(settings.distil) - set(KINDS):
        raise UsageError(f"distil: unknown kinds {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    scheme = settings.scheme
    prose = read_text(text, None)
    cut = max(0, len(prose) - settings.heldout)
    read, heldout = prose[:cut], prose[cut:]
    opened = open_source(base)
    tokenizer = opened.tokenizer
    check_length(read, tokenizer, settings.schedule.longest)
    original = load_original(opened)
    check_groups(original.config, scheme)
    digest = hashlib.sha256(prose.encode()).hexdigest()
    run = {"base": opened.fingerprint, "text": digest, **asdict(limit), **asdict(settings)}
    claim(output, run)
    if not (output / RESULTS).exists():
        batches = TokenWindows(output, read, tokenizer)
        trio = Trio(original, levels_of(original, _calibration(batches, settings)), settings, device)
        schedule = replace(settings.schedule, steps=planned_steps(output, trio, batches, limit, began))
        exam = Exam(trio.teacher, tokenizer, heldout)
        models = {kind: continue_one(kind, trio, batches, schedule, exam, output / kind, run) for kind in KINDS}
        results = {
            "run": run,
            "steps": schedule.steps,
            "tokens": schedule.steps * schedule.accumulate * schedule.tokens,
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
            "torch": torch.__version__,
            "base": exam.score(trio.teacher),
            "models": models,
        }
        write_atomically(output / RESULTS, json.dumps(results, indent=1) + "\n")
    return json.loads((output / RESULTS).read_text(encoding="utf-8"))


def apply(delta_file: Path, base: Path, output: Path) -> None:
    """Write the checkpoint, in bfloat16, that a delta makes of its base.

    Raises:
        CheckpointError: the delta is of another base, or one of the two cannot be read.
        OutputExistsError: the output is there.
    """
    check_output(base, output, overwrite=False)
    delta = read_delta(delta_file)
    opened = open_source(base)
    if delta.base != opened.fingerprint:
        raise CheckpointError(f"{delta_file} was trained on another base than {base}; give the one it was trained on")
    model = applied(delta, load_original(opened))
    with stage_output(output, {"verb": "apply"}, 2 * model.num_parameters(), overwrite=False) as staging:
        model.save_pretrained(staging.folder)
        opened.tokenizer.save_pretrained(staging.folder)


def load_original(base: Source) -> DiffTransformer:
    """Transformer that all three models start from, in float32.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        UsageError: the checkpoint is no Transformer's.
    """
    original = load(base, dtype=torch.float32, device="cpu")
    if original.config.diff_spec.maps != 1:
        raise UsageError(
            f"{base.path} is {original.config.diff_spec.attention_name}; give a Transformer, a Llama checkpoint"
        )
    original.use_attention("flashdiff1")
    return original


def results_table(results: Results) -> str:
    """Perplexities of each kind at its stages, as a table."""
    head = ["model", "start", "trained", "kept", "KL of kept from trained", "delta"]
    lines = [
        [
            kind,
            *(f"{model[stage]['perplexity']:.3f}" for stage in ("start", "trained", "kept")),
            f"{model['kept']['kl_from_trained']:.5f}",
            f"{model['delta_bytes'] / 1e6:.1f} MB",
        ]
        for kind, model in results["models"].items()
    ]
    title = f"perplexity of the text held out; the base's is {results['base']['perplexity']:.3f}"
    return "\n".join([title, *align_columns(head, lines)])


def _calibration(batches: Batches, settings: PairsSettings) -> torch.Tensor:
    length = settings.schedule.longest
    ids, _ = batches.batch(settings.schedule.seed, 0, max(1, settings.calibration // length), length)
    return ids[:, :-1]


if __name__ == "__main__":
    with exit_codes():
        commands()
