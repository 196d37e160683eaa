"""The models that ship: what they learned, and what each bit width leaves of it."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from diffquant import data
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import OutputExistsError
from diffquant.measure.protocols import needle
from diffquant.measure.protocols.needle import NeedlePlan
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.verbs import demonstration as pocket
from diffquant.verbs.demo import demo
from tests.support.thorough import sampled, thorough

MODELS = {path.name: path for path in data.pocket_models("needle")}
NAMES = pytest.mark.parametrize("name", MODELS)


@cache
def tokenizer():
    return load_tokenizer(next(iter(MODELS.values())))


def retrieved(name, needles=4, **recipe):
    """Share of 50 contexts of 256 tokens whose number the model gives."""
    model = load(MODELS[name], Recipe.of(**recipe))
    plan = NeedlePlan(needles, samples=10)
    _, shares = needle.evaluate_needle(TorchModel(model, tokenizer()), data.books_text(), plan)
    return sum(shares) / len(shares)


@NAMES
@pytest.mark.parametrize("needles", sampled([2, 1], 2))
def test_all_retrieve_the_number_of_the_city_that_is_asked_for(name, needles):
    assert retrieved(name, needles) >= 0.94


@NAMES
@pytest.mark.parametrize("logits", sampled(["6:tensor", "16", "4:row", "8:tensor"], 2))
def test_all_tell_four_needles_apart_down_to_6_bits_of_logits_a_tensor_and_4_a_row(name, logits):
    assert retrieved(name, logits=logits) >= 0.9


@NAMES
@thorough
def test_3_bits_of_logits_a_tensor_lose_the_needles_and_shifted_rows_keep_them(name):
    assert retrieved(name, logits="3:tensor") <= 0.1
    assert retrieved(name, logits="3:row:shift") >= 0.94


@NAMES
@pytest.mark.parametrize("recipe", sampled([{"weights": "3:row"}, {"kv": "4:row"}], 2), ids=str)
def test_all_keep_their_needles_in_low_bit_weights_and_cache(name, recipe):
    assert retrieved(name, **recipe) >= 0.9


@NAMES
@thorough
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


@thorough
def test_pocket_demo_shows_figure_8_and_asks_the_4_bit_model(tmp_path, capsys):
    folder = tmp_path / "my demo"
    demo(folder, pocket=True, overwrite=False)
    text = capsys.readouterr().out
    found = {name: counts_of(text, name) for name in MODELS}
    # Columns: 16 bits, 4 and 3 bits with one scale per tensor, then with shifted rows.
    assert all(counts[2] <= 3 for counts in found.values())

    assert all(min(counts[3:]) >= 27 for counts in found.values())
    answers = re.findall(r"^(?:torch|ONNX Runtime): .*Paris is (.*)$", text, re.M)
    assert [answer.split()[0].strip(".") for answer in answers] == ["42"] * 2
    verify = next(line for line in text.splitlines() if line.startswith("  diffquant verify "))
    assert [Path(word).is_dir() for word in shlex.split(verify)[2:]] == [True] * 2
    # It ends with what to open and what to do next, and no line of its own is too long for a terminal.
    assert text.index(answers[-1]) < text.index(f"  {folder}/retrieval/report.html\n") < text.index("ORG/NAME")
    assert max(len(line) for line in text.split("2. Quantize")[0].splitlines() if str(tmp_path) not in line) <= 80
    with pytest.raises(OutputExistsError):
        demo(folder, pocket=True, overwrite=False)


@pytest.fixture
def first_act(tmp_path, monkeypatch, capsys):
    """What the demo says around its tables of Figure 8, in one line."""
    monkeypatch.setattr(pocket, "_sweep", lambda *_: None)
    pocket.show_figure_8(tmp_path)
    return " ".join(capsys.readouterr().out.split())


def test_the_demo_says_which_training_it_shows_and_that_another_came_out_the_other_way(first_act):
    (seed,) = {json.loads((path / "training.json").read_text())["schedule"]["seed"] for path in MODELS.values()}
    assert f"The models that find numbers were trained once, with seed {seed}. Which of them loses" in first_act
    assert "in another training the Transformer lost most" in first_act


def test_the_demo_says_which_runs_its_english_models_are_and_what_all_six_trainings_say(first_act):
    runs = [json.loads((path / "training.json").read_text()) for path in data.pocket_models("prose")]
    assert [run["run"] for run in runs] == [f"e1-{run['kind']}-seed-101" for run in runs]
    assert {run["schedule"]["seed"] for run in runs} == {101}
    assert "Each model was trained once here, with seed 101 and its best learning rate" in first_act
    assert f"at 4 bits with one scale per tensor. Compared with the Transformer, {pocket.ANSWER}." in first_act
    assert f"because their predictions are more sensitive: {pocket.SENSITIVITY}." in first_act
    assert f"DIFF models of three sizes gain {pocket.AT_PAPERS_RATIO} bits." in first_act


def counts_of(table, name):
    """Numbers of a model's row in a table of the demo."""
    return [int(count) for count in re.search(rf"^{name} +([0-9 ]+)$", table, re.M)[1].split()]
