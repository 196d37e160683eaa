"""The English models that ship: what they predict, and what each bit width costs them."""

import json
from functools import cache

import pytest
import torch

from diffquant import data
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.measure.tasks import perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from tests.support.tables import in_one_test

MODELS = {path.name: path for path in data.pocket_models("prose")}
KINDS = ["prose-transformer", "prose-diff-v1", "prose-diff-v2"]
TEXT = data.books_text()[:4096]
WINDOW = 256


@cache
def reference(name):
    model = load(MODELS[name], dtype=torch.float32)
    return perplexity.compute_reference(TorchModel(model, load_tokenizer(MODELS[name])), TEXT, WINDOW, WINDOW)


def scores(name, **recipe):
    model = load(MODELS[name], Recipe.of(**recipe), dtype=torch.float32)
    return perplexity.compute_perplexity(
        TorchModel(model, load_tokenizer(MODELS[name])), TEXT, WINDOW, WINDOW, reference=reference(name)
    )


@in_one_test("name", KINDS)
def test_they_predict_english_they_have_not_seen(name):
    # 2,048 equally likely tokens would be a perplexity of 2,048.
    assert scores(name)["perplexity"] < 90


@pytest.mark.parametrize("name", KINDS)
def test_fewer_bits_of_logits_cost_more(name):
    costs = [scores(name, logits=f"{bits}:tensor")["kl"] for bits in (8, 6, 4, 3)]
    assert costs == sorted(costs)
    assert costs[1] < 0.02 < costs[3]
    assert scores(name, logits="3:row:shift")["kl"] < costs[3] / 10


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("recipe", "most"),
    [({"weights": "8:row"}, 0.001), ({"weights": "4:row"}, 0.15), ({"kv": 8}, 0.001), ({"kv": 4}, 0.08)],
    ids=str,
)
def test_weights_and_cache_cost_little(name, recipe, most):
    assert 0 < scores(name, **recipe)["kl"] < most


def test_they_were_trained_alike():
    runs = {name: json.loads((path / "training.json").read_text()) for name, path in MODELS.items()}
    counts = [run.pop("parameters") for run in runs.values()]
    assert max(counts) / min(counts) < 1.01
    assert [f"prose-{run.pop('kind')}" for run in runs.values()] == list(MODELS) == KINDS
    for run in runs.values():
        # What each training found by itself.
        for own in ("run", "weights", "validation", "books", "environment"):
            del run[own]
    first = next(iter(runs.values()))
    assert all(run == first for run in runs.values())
