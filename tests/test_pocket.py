"""The models that ship: what they learned, and what each bit width leaves of it."""

import json
from functools import cache

import pytest

from diffquant import data
from diffquant.demo import pocket_demo
from diffquant.errors import OutputExistsError
from diffquant.evals.protocols import needle
from diffquant.evals.protocols.needle import NeedlePlan
from diffquant.evals.torch_model import TorchModel
from diffquant.loading import load
from diffquant.recipe import Recipe
from diffquant.source.tokenizer import load_tokenizer

MODELS = {path.name: path for path in data.pocket_models("needle")}
NAMES = pytest.mark.parametrize("name", MODELS)


@cache
def tokenizer():
    return load_tokenizer(next(iter(MODELS.values())))


def retrieved(name, needles=4, **recipe):
    """Share of 50 contexts of 256 tokens whose number the model gives."""
    model = load(MODELS[name], Recipe.of(**recipe))
    outcome = needle.evaluate_needle(TorchModel(model), tokenizer(), data.books_text(), NeedlePlan(needles, samples=10))
    return sum(outcome.retrieved) / len(outcome.retrieved)


@NAMES
@pytest.mark.parametrize("needles", [1, 2])
def test_all_retrieve_the_number_of_the_city_that_is_asked_for(name, needles):
    assert retrieved(name, needles) >= 0.94


@NAMES
@pytest.mark.parametrize("logits", ["16", "8:tensor", "6:tensor", "4:row"])
def test_all_tell_four_needles_apart_down_to_6_bits_of_logits_a_tensor_and_4_a_row(name, logits):
    assert retrieved(name, logits=logits) >= 0.9


@NAMES
def test_3_bits_of_logits_a_tensor_lose_the_needles_and_shifted_rows_keep_them(name):
    assert retrieved(name, logits="3:tensor") <= 0.1
    assert retrieved(name, logits="3:row:shift") >= 0.94


@NAMES
@pytest.mark.parametrize("recipe", [{"weights": "3:row"}, {"kv": "4:row"}], ids=str)
def test_all_keep_their_needles_in_low_bit_weights_and_cache(name, recipe):
    assert retrieved(name, **recipe) >= 0.9


@NAMES
def test_2_bits_of_weights_lose_the_needles(name):
    assert retrieved(name, weights="2:row") <= 0.3


def test_the_models_ship_with_how_they_were_trained():
    runs = {name: json.loads((path / "training.json").read_text()) for name, path in MODELS.items()}
    counts = [run.pop("parameters") for run in runs.values()]
    assert max(counts) / min(counts) < 1.01
    assert [f"needle-{run.pop('kind')}" for run in runs.values()] == list(MODELS)
    first = next(iter(runs.values()))
    assert all(run == first for run in runs.values())
    for path in MODELS.values():
        last = json.loads((path / "log.jsonl").read_text().splitlines()[-1])
        assert last["step"] == first["schedule"]["steps"]


def test_pocket_demo_asks_the_4_bit_model_and_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("diffquant.demo.POCKET_TASKS", ("needle:1",))
    said = []
    pocket_demo(tmp_path / "out", 5, False, said.append)
    assert (tmp_path / "out" / "sweep" / "places.png").is_file()
    answers = [line for line in said if line.startswith("The magic number for Paris")]
    assert answers
    assert all(line.split("Paris is")[-1].split()[:1] == ["42"] for line in answers)
    with pytest.raises(OutputExistsError):
        pocket_demo(tmp_path / "out", 5, False, said.append)
