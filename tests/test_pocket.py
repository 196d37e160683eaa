"""The models that ship: what they learned, and what each bit width leaves of it."""

import json
from functools import cache

import pytest

from diffquant import data
from diffquant.checkpoint.load import load, load_tokenizer
from diffquant.demo import pocket_demo
from diffquant.errors import OutputExistsError
from diffquant.evals import needle
from diffquant.evals.needle import Plan
from diffquant.scheme import Recipe

MODELS = {path.name: path for path in data.pocket_models("needle")}
SAMPLES = 20


@cache
def tokenizer():
    return load_tokenizer(next(iter(MODELS.values())))


def retrieved(name, needles, **recipe):
    """Share of contexts of 256 tokens whose number the model gives; 100 contexts."""
    model = load(MODELS[name], Recipe.of(**recipe))
    outcome = needle.evaluate(model, tokenizer(), data.books_text(), Plan(needles, samples=SAMPLES))
    return sum(outcome.retrieved) / len(outcome.retrieved)


@pytest.mark.parametrize("bits", [16, 8, 6, 4])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_diff_v1_tells_four_needles_apart_down_to_4_bits_of_logits(bits, granularity):
    scheme = "16" if bits == 16 else f"{bits}:{granularity}"
    assert retrieved("needle-diff-v1", 4, logits=scheme) >= (0.85 if bits == 4 else 0.97)


@pytest.mark.parametrize("bits", [16, 8, 6, 4])
@pytest.mark.parametrize("name", ["needle-transformer", "needle-diff-v2"])
def test_the_others_find_one_needle_down_to_4_bits_of_logits(name, bits):
    assert retrieved(name, 1, logits="16" if bits == 16 else f"{bits}:tensor") >= 0.9


@pytest.mark.parametrize("name", ["needle-transformer", "needle-diff-v2"])
def test_the_others_guess_among_four_needles(name):
    assert 0.1 <= retrieved(name, 4) <= 0.4


@pytest.mark.parametrize("name", ["needle-transformer", "needle-diff-v1"])
def test_3_bits_of_logits_a_tensor_lose_the_needle_and_shifted_rows_keep_it(name):
    assert retrieved(name, 1, logits="3:tensor") <= 0.5
    assert retrieved(name, 1, logits="3:row:shift") >= 0.9


@pytest.mark.parametrize("recipe", [{"weights": "4:g32"}, {"kv": 8}, {"kv": 4}], ids=str)
def test_diff_v1_keeps_its_needles_in_low_bit_weights_and_cache(recipe):
    assert retrieved("needle-diff-v1", 4, **recipe) >= 0.9


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
