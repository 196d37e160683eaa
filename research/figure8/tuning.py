"""Fine-tuning with rounded logits (E7 of protocol.md): its bases, its straight-through loss, its scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import diffquant
from diffquant import data
from diffquant.calib.outliers import measure_magnitudes
from diffquant.checkpoints.texts import text_digest
from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.support.progress import Progress, report_nothing
from research.figure8 import scoring
from research.figure8.plan import Result, Run
from research.figure8.record import weights_digest
from research.studies.figure8 import analyse, prose_readings
from research.studies.figure8_model import passage_means
from research.studies.logit_noise import SeenAttention, difference, divergences, losses, observed, predictions_of

SCHEMES = [f"{bits}:{shared}" for shared in ("tensor", "row") for bits in scoring.BITS]
# Schemes that models are trained for.
ARMS = ["4:tensor", "4:row"]
HELD_OUT = 128


class RoundedLoss:
    """Mean cross entropy of a model whose attention logits are rounded, with a straight-through gradient.

    The rounding is the product's. Rounded logits are logits plus a constant: neither the scale nor the rounding has a
    gradient. Everything is float32.
    """

    def __init__(self, model: DiffTransformer, scheme: Scheme) -> None:
        """Take a model; a scheme of 16 bits rounds nothing and computes the rest in the same way."""
        self._model = model
        self._scheme = scheme

    def __call__(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted cross entropy, a scalar, of ids [rows, length + 1] under weights [rows, length]."""
        with observed(self._model, self._attend):
            predictions = self._model(ids[:, :-1], use_cache=False).logits
        each = cross_entropy(predictions.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (each * weights.flatten()).sum()

    def _attend(self, seen: SeenAttention) -> Tensor:
        return difference(seen.terms(straight_through(seen, self._scheme)))


def straight_through(seen: SeenAttention, scheme: Scheme) -> list[Tensor]:
    """Round each map's logits so that gradients pass as if they had not been rounded."""
    if not scheme.quantizes:
        return seen.logits
    with torch.no_grad():
        _, rounded = seen.rounded(scheme)
        errors = [after - before for after, before in zip(rounded, seen.logits, strict=True)]
    return [logits + error for logits, error in zip(seen.logits, errors, strict=True)]


def loss_of(run: Run, model: DiffTransformer) -> RoundedLoss:
    """Loss that a run of E7 trains."""
    return RoundedLoss(model, FULL if run.tuned_at == "16" else Scheme.parse(run.tuned_at))


def base_folder(run: Run, build: Path) -> Path:
    """Folder of the model that a run of E7 starts from: one that ships, or one that its run left under `build`."""
    if run.base_run is None:
        (folder,) = (path for path in data.pocket_models("prose") if path.name == f"prose-{run.architecture}")
        return folder
    return build / run.base_run / "model"


def load_base(run: Run, build: Path, there: Mapping[str, Result]) -> tuple[DiffTransformer, dict[str, Any]]:
    """Load the model that a run of E7 starts from, or that is read; returns it with what the raw file says of it.

    Raises:
        UsageError: it is not here, or its weights are not those of its run's raw file.
    """
    folder = base_folder(run, build)
    if not folder.exists():
        raise UsageError(f"{run.name} starts from the model of {run.base_run}, which is not in {folder}: train it here")
    model = diffquant.load(folder, dtype="float32", device="cpu").requires_grad_()
    digest = weights_digest(model)
    if run.base_run is not None and digest != there[run.base_run]["weights"]:
        raise UsageError(f"{folder} has other weights than the raw file of {run.base_run}: train it here again")
    return model, {"run": run.base_run or f"diffquant/data/pocket/{folder.name}", "weights": digest}


@torch.inference_mode()
def tuned_scores(
    model: DiffTransformer, tokenizer: Any, held_out: Tensor, progress: Progress = report_nothing
) -> dict[str, Any]:
    """Score a fine-tuned model: loss and KL under each scheme by passage, ranges, sensitivities, largest magnitudes."""
    books = prose_readings(model, tokenizer, data.books_text(), scoring.BOOKS)
    measured = analyse(model, books, [Scheme.parse(name) for name in ARMS], progress)
    exact = predictions_of(model, books)
    nll, kl = {"16": losses(books, exact)}, {}
    for name in SCHEMES:
        model.apply_recipe(Recipe.of(logits=name))
        rounded = predictions_of(model, books)
        nll[name], kl[name] = losses(books, rounded), divergences(exact, rounded)
    elsewhere = {}
    for name in ("16", *ARMS):
        model.apply_recipe(Recipe() if name == "16" else Recipe.of(logits=name))
        elsewhere[name] = scoring.validation(model, held_out[:HELD_OUT])
    model.apply_recipe(Recipe())
    steps = {f"{step:g}": scoring.kl_of_step(model, books, exact, step) for step in scoring.STEPS}
    _, overall = measure_magnitudes(model, torch.cat([reading.ids[:, :-1] for reading in books]))
    return {
        "books": {
            "reading": {
                "passages": scoring.BOOKS.passages,
                "window": scoring.BOOKS.window,
                "text": text_digest(data.books_text()),
                "windows_in_a_passage": scoring.BOOKS.windows,
            },
            "layers": measured["layers"],
            "nll": _by_passage(nll),
            "kl": _by_passage(kl),
            "kl_of_steps": _by_passage(steps),
        },
        "held_out": elsewhere,
        "outliers": {kind: {"top": found.top, "median": found.median} for kind, found in overall.items()},
    }


def _by_passage(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: passage_means(each, scoring.BOOKS.windows) for name, each in values.items()}
