"""Three models while they train: where they start, how long they take, how well they predict."""

import json
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffquant.errors import UsageError
from diffquant.measure.language_model import ModelOutputs
from diffquant.measure.tasks.perplexity import compute_perplexity, compute_reference
from diffquant.measure.torch_model import TorchModel
from diffquant.model.modeling import DiffTransformer
from diffquant.support.files import write_atomically
from diffquant.support.progress import progress_for
from research.train.deltas import applied, difference, write_delta
from research.train.distil import Continuation, Objective
from research.train.loop import LOG, Batches
from research.train.models import KINDS, place
from research.train.settings import PairsSettings, Schedule
from research.train.starts import Level, attention_parameters, new_model

PLAN, DELTA = "plan.json", "delta.safetensors"
# Share of the time that checkpoints and the trained models' evaluation take.
_SPARE = 0.1

Results = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """Limit of a run: minutes for the whole command, or steps of each model, which count where both are given."""

    minutes: float
    steps: int | None = None


class Trio:
    """Three models where they train, and the Transformer they are compared with.

    Attributes:
        original: Transformer in float32, on the CPU.
        teacher: Transformer where the models are, in their dtype.
        models, objectives: model and objective of each kind.
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
        """Move a model to where the three are, in their dtype."""
        model.use_attention(self.backend)
        return place(model, self.device, self.dtype)

    def seconds_a_step(self, batches: Batches) -> dict[str, float]:
        """Seconds of a step of each kind, its share of distilling steps counted in."""
        seconds_by_kind = {}
        for kind, objective in self.objectives.items():
            share = self.settings.distil.get(kind, 0.0)
            seconds_by_kind[kind] = (1 - share) * objective.seconds(batches, self.settings.schedule, distil=False)
            if share:
                seconds_by_kind[kind] += share * objective.seconds(batches, self.settings.schedule, distil=True)
        return seconds_by_kind

    def _start(self, kind: str) -> DiffTransformer:
        seed = self.settings.schedule.seed
        model = new_model(kind, self.original, self.levels, self.settings.perturbation, seed)
        for parameter in attention_parameters(model).values():
            parameter.requires_grad_(True)
        return model


class Exam:
    """Exam on held-out text, against what the base predicts of it."""

    def __init__(self, base: DiffTransformer, tokenizer: Any, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._reference = self.reference(base)

    # Compiled layers would be compiled again for every shape of a batch.
    @torch.compiler.set_stance("force_eager")
    def reference(self, model: DiffTransformer) -> ModelOutputs:
        """Predictions of a model, to compare others with."""
        return compute_reference(TorchModel(model, self._tokenizer), self._text)

    @torch.compiler.set_stance("force_eager")
    def score(self, model: DiffTransformer, reference: ModelOutputs | None = None) -> dict[str, float]:
        """Perplexity, and mean KL in nats from the base or another reference."""
        score = compute_perplexity(
            TorchModel(model, self._tokenizer), self._text, reference=reference or self._reference
        )
        return {name: score[name] for name in ("perplexity", "kl")}


def planned_steps(output: Path, trio: Trio, batches: Batches, limit: Limit, began: float) -> int:
    """Number of steps of each model, decided once a run.

    Raises:
        UsageError: there is no time for a step.
    """
    if steps := limit.steps or trio.settings.schedule.steps:
        return steps
    plan = output / PLAN
    if not plan.exists():
        seconds = trio.seconds_a_step(batches)
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
    kind: str, trio: Trio, batches: Batches, schedule: Schedule, exam: Exam, folder: Path, run: Results
) -> Results:
    """Train one model, or go on, and keep its delta; returns how well it predicts the text held out at each stage."""
    folder.mkdir(exist_ok=True)
    model, settings = trio.models[kind], trio.settings
    start = exam.score(model)
    trainer = Continuation(model, schedule, trio.objectives[kind], settings.distil.get(kind, 0.0))
    if not trainer.resume(folder):
        (folder / LOG).unlink(missing_ok=True)
    trainer.train(batches, folder, every=settings.every, progress=progress_for(f"train {kind}"))
    delta = difference(kind, run["base"], settings.scheme, run, trio.levels, trainer.trained, trio.original)
    write_delta(folder / DELTA, delta)
    restored = trio.placed(applied(delta, trio.original))
    return {
        "start": start,
        "trained": exam.score(model),
        "kept": exam.score(restored) | {"kl_from_trained": exam.score(restored, exam.reference(model))["kl"]},
        "delta_bytes": delta.nbytes,
    }
