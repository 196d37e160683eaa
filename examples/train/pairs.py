"""Continue a Transformer, and the DIFF V1 and DIFF V2 made of it, on the same tokens.

    python examples/train/pairs.py train --text books.txt --output runs/pairs --device cuda
    python examples/train/pairs.py apply runs/pairs/diff-v1/delta.safetensors SmolLM2-135M.gguf smollm2-diff-v1

Attention alone trains, so that a file of a few bits a weight turns the base into the trained model: `apply` makes the
checkpoint that every diffquant command takes. The same command again goes on from the last checkpoint.
"""

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from deltas import applied, check_groups, read_delta
from loop import Batches
from models import KINDS
from settings import PairsSettings
from starts import levels_of
from tokens import TokenWindows, check_length
from train import claim, read_text
from trio import Exam, Limit, Results, Trio, continue_one, planned_steps

from diffquant.demo import smollm2
from diffquant.errors import CheckpointError, DiffQuantError, UsageError
from diffquant.formats.atomic_folder import check_output, staged
from diffquant.inspection import inspect_checkpoint
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.report.tables import aligned
from diffquant.source.source import Source, open_source
from diffquant.support.devices import check_device
from diffquant.support.files import write_atomically

RESULTS = "results.json"


def main() -> None:
    arguments = _parser().parse_args()
    try:
        if arguments.verb == "apply":
            apply(arguments.delta, arguments.base, arguments.output)
            print(inspect_checkpoint(arguments.output))
            return
        settings = PairsSettings.read(arguments.settings)
        base = arguments.base or smollm2()
        limit = Limit(arguments.minutes, arguments.steps)
        print(results_table(train(settings, base, arguments.text, arguments.output, limit, arguments.device)))
    except (DiffQuantError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the same command goes on from the last checkpoint in {arguments.output}", file=sys.stderr
        )
        sys.exit(130)


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
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
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
    with staged(output, {"verb": "apply"}, 2 * model.num_parameters(), overwrite=False) as staging:
        model.save_pretrained(staging.folder)
        opened.tokenizer.save_pretrained(staging.folder)


def load_original(base: Source) -> DiffTransformer:
    """Transformer that all three models start from, in float32.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        UsageError: the checkpoint is no Transformer's.
    """
    original = load(base, dtype=torch.float32)
    if original.config.diff_spec.maps != 1:
        raise UsageError(
            f"{base.path} is {original.config.diff_spec.generation}; give a Transformer, a Llama checkpoint"
        )
    original.use_attention("flashdiff1")
    return original


def results_table(results: Results) -> str:
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
    return "\n".join([title, *aligned(head, lines)])


def _calibration(batches: Batches, settings: PairsSettings) -> torch.Tensor:
    length = settings.schedule.longest
    ids, _ = batches.batch(settings.schedule.seed, 0, max(1, settings.calibration // length), length)
    return ids[:, :-1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Continue a Transformer and DIFF models made of it.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    train_verb = verbs.add_parser("train", help="train all three, or go on")
    train_verb.add_argument("--text", type=Path, required=True, help="English prose, UTF-8 (.xz is unpacked)")
    train_verb.add_argument("--output", type=Path, required=True, help="folder to make, or to go on in")
    train_verb.add_argument("--base", type=Path, help="a Llama, folder or .gguf; the wheel's SmolLM2-135M by default")
    train_verb.add_argument("--settings", type=Path, default=Path(__file__).with_name("pairs.yaml"))
    train_verb.add_argument("--minutes", type=float, default=24.0, help="for all of the command")
    train_verb.add_argument("--steps", type=int, help="of each model, instead of what the minutes allow")
    train_verb.add_argument("--device", default="cpu")
    apply_verb = verbs.add_parser("apply", help="make the trained checkpoint of a delta and its base")
    apply_verb.add_argument("delta", type=Path)
    apply_verb.add_argument("base", type=Path)
    apply_verb.add_argument("output", type=Path, help="folder to make")
    return parser


if __name__ == "__main__":
    main()
