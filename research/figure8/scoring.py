"""Scores of a trained model: KL under every scheme by passage, ranges, sensitivities, and its outliers."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffquant import data
from diffquant.calib.outliers import measure_magnitudes
from diffquant.checkpoints.texts import text_digest
from diffquant.checkpoints.tokens import encode_windows
from diffquant.errors import NonFiniteError
from diffquant.measure.stats import standard_error
from diffquant.measure.sweep.subject import kv_bytes_per_token
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress, report_nothing
from research.studies.figure8 import Settings, analyse, prose_readings
from research.studies.figure8_model import passage_means
from research.studies.kv_decoded import LONG, CacheForm, read_caches
from research.studies.kv_results import texts_of
from research.studies.logit_noise import (
    Reading,
    SeenAttention,
    difference,
    divergences,
    losses,
    observed,
    predictions_of,
)

BITS = (8, 6, 4, 3)
SHARED = ("tensor", "head", "pair", "row", "tensor:alike", "head:alike", "row:alike", "tensor:shift", "row:shift")
SCHEMES = [f"{bits}:{shared}" for shared in SHARED for bits in BITS]
OPERANDS = [f"{bits}:{shared}" for shared in ("tensor", "head", "row") for bits in BITS]
# Formats beside integers, and softmax weights before their row's sum divides them: a target and a scheme.
_FLOATS = ("e4m3:row", "nvfp4", "mxfp4")
FORMATS = [f"{target} {scheme}" for target in ("logits", "qk") for scheme in ("e4m3:tensor", *_FLOATS)]
FORMATS += [f"p {scheme}" for scheme in (*(f"{bits}:row" for bits in BITS), *_FLOATS)]
# KV caches of the larger models, the preset `kv-4bit-best` and what it is chosen among.
CACHES = (
    "8:row, 8:row",
    "4:row, 4:row, residual 64",
    "4:c32, 4:row, residual 64",
    "4:c32, 4:row:rotated, residual 64",
    "4:c32, 4:row:rotated",
    "3:c32, 3:row:rotated",
)
CACHE_CHARACTERS = 24576
# Steps that logits are rounded to whatever their range is.
STEPS = (1.0, 2.0, 4.0, 8.0)
BOOKS, WEB = Settings(windows=4), Settings(windows=2)
_BATCH = 16


@torch.inference_mode()
def validation(model: DiffTransformer, held_out: Tensor) -> dict[str, Any]:
    """Negative log-likelihood in nats a token and perplexity on text that was not trained on.

    Raises:
        NonFiniteError: a loss is no number, as where the last step of a training leaves such weights.
    """
    losses = []
    for ids in held_out.to(model.device).split(_BATCH):
        logits = model(ids[:, :-1], use_cache=False).logits.float()
        losses += cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1).tolist()
    nll = sum(losses) / len(losses)
    if not math.isfinite(nll):
        raise NonFiniteError(f"the loss on held-out text is {nll}; lower the learning rate")
    return {"nll": nll, "se": standard_error(losses), "perplexity": float(torch.tensor(nll).exp())}


@torch.inference_mode()
def scores(model: DiffTransformer, tokenizer: Any, progress: Progress = report_nothing) -> dict[str, Any]:
    """All that is measured of a model, as plain data; lists are by passage."""
    books = prose_readings(model, tokenizer, data.books_text(), BOOKS)
    schemes = [Scheme.parse(name) for name in SCHEMES]
    measured = analyse(model, books, schemes, progress)
    reading = {"passages": BOOKS.passages, "window": BOOKS.window, "text": text_digest(data.books_text())}
    web = web_text()
    exact = predictions_of(model, books)
    by_passage = partial(passage_means, windows=BOOKS.windows)
    return {
        # Values are by passage, so a passage has one.
        "books": {
            "reading": reading | {"windows_in_a_passage": BOOKS.windows, "windows": 1, "books": 4},
            "nll": by_passage(measured["nll"]),
            "layers": measured["layers"],
            "kl": {scheme: by_passage(values) for scheme, values in measured["kl"].items()},
            "kl_of_steps": {f"{step:g}": by_passage(kl_of_step(model, books, exact, step)) for step in STEPS},
            "kl_of_qk": _under(model, books, {name: Recipe.of(qk=name) for name in OPERANDS}, BOOKS)["kl"],
            "kl_of_formats": _under(model, books, {name: _of_format(name) for name in FORMATS}, BOOKS)["kl"],
        },
        "web": {"reading": reading | {"windows_in_a_passage": WEB.windows, "text": text_digest(web)}}
        | _under(
            model,
            prose_readings(model, tokenizer, web, WEB),
            {name: Recipe(logits=scheme) for name, scheme in zip(SCHEMES, schemes, strict=True)},
            WEB,
        ),
        "outliers": _outliers(model, books),
    }


@torch.inference_mode()
def caches(model: DiffTransformer, tokenizer: Any) -> dict[str, Any]:
    """KL by window of KV caches, read as generation reads them: half a window as a prompt, then token by token."""
    texts = texts_of(CACHE_CHARACTERS)
    windows = {name: encode_windows(model, tokenizer, text, BOOKS.window) for name, text in texts.items()}
    forms = [CacheForm.named(name) for name in CACHES]
    scored = BOOKS.window // 2
    rows = {form.name: row for form, row in read_caches(model, windows, forms, scored, batch=64)}
    digests = {name: text_digest(text) for name, text in texts.items()}
    reading = {"window": BOOKS.window, "scored": scored, **digests}
    return {"reading": reading, "bytes_long_at_16_bits": kv_bytes_per_token(model, LONG), "rows": rows}


def web_text() -> str:
    """HellaSwag's contexts with their right endings: another domain than books."""
    items = [json.loads(line) for line in data.hellaswag_lines()]
    return "\n\n".join(f"{item['ctx_a']} {item['ctx_b']} {item['endings'][item['label']]}" for item in items)


def _of_format(name: str) -> Recipe:
    target, scheme = name.split()
    return Recipe.parse({target: scheme})


def _under(
    model: DiffTransformer, readings: Sequence[Reading], recipes: Mapping[str, Recipe], settings: Settings
) -> dict[str, Any]:
    """NLL at 16 bits, and KL under each recipe."""
    model.apply_recipe(Recipe())
    exact = predictions_of(model, readings)
    nll = losses(readings, exact)
    kl = {}
    for name, recipe in recipes.items():
        model.apply_recipe(recipe)
        kl[name] = passage_means(divergences(exact, predictions_of(model, readings)), settings.windows)
    model.apply_recipe(Recipe())
    return {"nll": passage_means(nll, settings.windows), "kl": kl}


def kl_of_step(
    model: DiffTransformer, readings: Sequence[Reading], exact: Sequence[Tensor], step: float
) -> list[float]:
    """KL of logits rounded to multiples of a step, which no range decides and no code limits."""

    def see(attention: SeenAttention) -> Tensor:
        return difference(attention.terms([(logits / step).round() * step for logits in attention.logits]))

    with observed(model, see):
        return divergences(exact, predictions_of(model, readings))


def _outliers(model: DiffTransformer, readings: Sequence[Reading]) -> dict[str, Any]:
    """Table 5: the largest magnitudes and the median of logits and hidden states, by layer and of all layers."""
    layers, overall = measure_magnitudes(model, torch.cat([reading.ids[:, :-1] for reading in readings]))
    as_data = [
        {kind: {"top": found.top, "median": found.median} for kind, found in magnitudes.items()}
        for magnitudes in (*layers, overall)
    ]
    return {"layers": as_data[:-1], "overall": as_data[-1]}
