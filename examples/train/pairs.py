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
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deltas import applied, check_groups, difference, read_delta, write_delta
from distil import Continuation, Objective
from loop import LOG, Source
from models import KINDS, place
from settings import PairsSettings, Schedule
from starts import Level, attention_parameters, levels_of, new_model
from tokens import TokenWindows, check_length
from train import claim, read_text

from diffquant.checkpoint.identity import model_fingerprint
from diffquant.checkpoint.inspection import inspect_checkpoint
from diffquant.checkpoint.load import check_device, load, load_tokenizer
from diffquant.checkpoint.staging import check_output, staged, write_atomically
from diffquant.demo import smollm2
from diffquant.errors import CheckpointError, DiffQuantError, UsageError
from diffquant.evals.perplexity import Reference, evaluate, reference_of
from diffquant.model.modeling import DiffTransformer
from diffquant.progress import progress_for
from diffquant.scheme import Scheme
from diffquant.texttable import aligned

PLAN, DELTA, RESULTS = "plan.json", "delta.safetensors", "results.json"
# Share of the time that checkpoints and the trained models' evaluation take.
_SPARE = 0.1

Results = dict[str, Any]


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
        print(table(train(settings, base, arguments.text, arguments.output, limit, arguments.device)))
    except DiffQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the same command goes on from the last checkpoint in {arguments.output}", file=sys.stderr
        )
        sys.exit(130)


@dataclass(frozen=True)
class Limit:
    """How long: minutes for the whole command, or steps of each model, which count where both are given."""

    minutes: float
    steps: int | None = None


def train(settings: PairsSettings, base: Path, text: Path, output: Path, limit: Limit, device: str = "cpu") -> Results:
    """Train the three models, or go on training them, into a folder; what `results.json` says then.

    Raises:
        DiffQuantError: settings, base, text or device cannot be, the folder holds another run, or time is too short.
    """
    began = time.monotonic()
    check_device(device)
    if unknown := set(settings.distil) - set(KINDS):
        raise UsageError(f"distil: unknown kinds {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    prose = read_text(text, None)
    cut = max(0, len(prose) - settings.heldout)
    read, heldout = prose[:cut], prose[cut:]
    tokenizer = load_tokenizer(base)
    check_length(read, tokenizer, settings.schedule.longest)
    original = load_original(base)
    check_groups(original.config, Scheme.parse(settings.delta))
    digest = hashlib.sha256(prose.encode()).hexdigest()
    run = {"base": model_fingerprint(base), "text": digest, **asdict(limit), **asdict(settings)}
    claim(output, run)
    if not (output / RESULTS).exists():
        source = TokenWindows(output, read, tokenizer)
        trio = Trio(original, levels_of(original, _calibration(source, settings)), settings, device)
        schedule = replace(settings.schedule, steps=planned_steps(output, trio, source, limit, began))
        exam = Exam(trio.teacher, tokenizer, heldout)
        models = {kind: continue_one(kind, trio, source, schedule, exam, output / kind, run) for kind in KINDS}
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
    if delta.base != model_fingerprint(base):
        raise CheckpointError(f"{delta_file} was trained on another base than {base}; give the one it was trained on")
    model = applied(delta, load_original(base))
    with staged(output, {"verb": "apply"}, 2 * model.num_parameters(), overwrite=False) as staging:
        model.save_pretrained(staging.folder)
        load_tokenizer(base).save_pretrained(staging.folder)


def load_original(base: Path) -> DiffTransformer:
    """The Transformer that all starts from, in float32.

    Raises:
        CheckpointError: it cannot be read.
        UsageError: it is no Transformer.
    """
    original = load(base, dtype=torch.float32)
    if original.config.diff_spec.maps != 1:
        raise UsageError(f"{base} is {original.config.diff_spec.generation}; give a Transformer, a Llama checkpoint")
    original.use_attention("flashdiff1")
    return original


class Trio:
    """The three models where they train, and the Transformer they are held against.

    Attributes:
        original: the Transformer in float32, on the CPU.
        teacher: the same where the models are, in their dtype.
        models, objectives: by kind.
    """

    def __init__(self, original: DiffTransformer, levels: list[Level], settings: PairsSettings, device: str) -> None:
        self.original, self.levels, self.settings, self.device = original, levels, settings, device
        on_cpu = device == "cpu"
        self.dtype = torch.float32 if on_cpu else torch.bfloat16
        # What has a backward pass: FlashAttention wants values as wide as keys, which V1's halves are.
        self.backend = "flashdiff1" if on_cpu else "flashdiff2"
        self.teacher = self.placed(deepcopy(original))
        self.models = {kind: self.placed(self._start(kind)) for kind in KINDS}
        self.objectives = {kind: Objective(m, self.teacher, compiled=not on_cpu) for kind, m in self.models.items()}

    def placed(self, model: DiffTransformer) -> DiffTransformer:
        model.use_attention(self.backend)
        return place(model, self.device, self.dtype)

    def seconds_a_step(self, source: Source) -> dict[str, float]:
        """Of each kind, what it distils counted in."""
        found = {}
        for kind, objective in self.objectives.items():
            share = self.settings.distil.get(kind, 0.0)
            found[kind] = (1 - share) * objective.seconds(source, self.settings.schedule, distil=False)
            if share:
                found[kind] += share * objective.seconds(source, self.settings.schedule, distil=True)
        return found

    def _start(self, kind: str) -> DiffTransformer:
        seed = self.settings.schedule.seed
        model = new_model(kind, self.original, self.levels, self.settings.perturbation, seed)
        for parameter in attention_parameters(model).values():
            parameter.requires_grad_(True)
        return model


class Exam:
    """The text held out, and what the base says of it."""

    def __init__(self, base: DiffTransformer, tokenizer: Any, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._reference = self.reference(base)

    def reference(self, model: DiffTransformer) -> Reference:
        return reference_of(model, self._tokenizer, self._text)

    def score(self, model: DiffTransformer, reference: Reference | None = None) -> dict[str, float]:
        """Perplexity, and mean KL in nats from the base or another reference."""
        found = evaluate(model, self._tokenizer, self._text, reference=reference or self._reference)
        return {"perplexity": found.perplexity, "kl": found.kl}


def planned_steps(output: Path, trio: Trio, source: Source, limit: Limit, began: float) -> int:
    """Steps of each model, decided once a run.

    Raises:
        UsageError: there is no time for any.
    """
    if steps := limit.steps or trio.settings.schedule.steps:
        return steps
    plan = output / PLAN
    if not plan.exists():
        seconds = trio.seconds_a_step(source)
        left = (1 - _SPARE) * (60 * limit.minutes - (time.monotonic() - began))
        steps = int(left / sum(seconds.values()))
        if steps < 1:
            raise UsageError(
                f"{limit.minutes:g} minutes leave {left:.0f} s, less than one step of each model takes "
                f"({sum(seconds.values()):.1f} s); give --minutes more"
            )
        write_atomically(plan, json.dumps({"steps": steps, "seconds_a_step": seconds}, indent=1) + "\n")
    return int(json.loads(plan.read_text(encoding="utf-8"))["steps"])


def continue_one(
    kind: str, trio: Trio, source: Source, schedule: Schedule, exam: Exam, folder: Path, run: Results
) -> Results:
    """Train one model, or go on, and keep its delta; how well it predicts the text held out at each stage."""
    folder.mkdir(exist_ok=True)
    model, settings = trio.models[kind], trio.settings
    start = exam.score(model)
    trainer = Continuation(model, schedule, trio.objectives[kind], settings.distil.get(kind, 0.0))
    if not trainer.resume(folder):
        (folder / LOG).unlink(missing_ok=True)
    trainer.train(source, folder, every=settings.every, progress=progress_for(f"train {kind}"))
    scheme = Scheme.parse(settings.delta)
    delta = difference(kind, run["base"], scheme, run, trio.levels, trainer.trained, trio.original)
    write_delta(folder / DELTA, delta)
    kept = trio.placed(applied(delta, trio.original))
    return {
        "start": start,
        "trained": exam.score(model),
        "kept": exam.score(kept) | {"kl_from_trained": exam.score(kept, exam.reference(model))["kl"]},
        "delta_bytes": delta.nbytes,
    }


def table(results: Results) -> str:
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


def _calibration(source: Source, settings: PairsSettings) -> torch.Tensor:
    length = settings.schedule.longest
    ids, _ = source.batch(settings.schedule.seed, 0, max(1, settings.calibration // length), length)
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
