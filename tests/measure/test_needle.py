"""The needle task: what is asked, what counts, and how a sweep shows it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffquant import data
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import UsageError
from diffquant.measure.protocols import needle
from diffquant.measure.protocols.needle import DEPTHS, NeedlePlan, encodable_sentences, make_items
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.outputs import write_outputs
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks.needle import Needle
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.earlier_results import recorded
from tests.support.tables import in_one_test

PLAN = NeedlePlan(needles=4, asked=2, lengths=(160, 300), samples=3)


@pytest.fixture(scope="module")
def items():
    return make_items(tiny_lm.tokenizer(), data.books_text(), PLAN)


def test_every_item_fits_its_length_and_fills_it(items):
    for item in items:
        prompt, answer = item.query_texts()[-1]
        tokens = len(tiny_lm.tokenizer().encode(prompt + answer))
        assert tokens <= item.length
        # A sentence of the text seldom has more.
        assert tokens > item.length - 120


def test_a_context_holds_all_its_needles_once_and_those_asked_for_together(items):
    for item in items:
        assert item.context.count("The magic number for") == PLAN.needles
        together = " ".join(needle.needle_sentence(*pair) for pair in item.asked)
        assert item.context.count(together) == 1


def test_no_two_cities_of_a_context_have_one_number():
    plan = NeedlePlan(needles=30, lengths=(700,), samples=2)
    for item in make_items(tiny_lm.tokenizer(), data.books_text(), plan):
        numbers = re.findall(r"magic number for \w+ is (\d+)\.", item.context)
        assert len(set(numbers)) == len(numbers) == plan.needles


@in_one_test("model", ["needle-transformer", "needle-diff-v1", "needle-diff-v2"])
def test_contexts_of_one_needle_are_those_of_the_recorded_cells(model):
    asked = [
        cell["result"]["items"]
        for cell in json.loads(recorded("pocket-needle-lengths/sweep.json"))["cells"]
        if cell["task"] == "needle:1:1" and Path(cell["model"]).name == model
    ]
    (path,) = (path for path in data.pocket_models("needle") if path.name == model)
    items = make_items(load_tokenizer(path), data.books_text(), NeedlePlan(lengths=(128, 256, 512)))[:300]
    assert asked
    assert set(asked) == {needle.needle_digest(items)}


def test_needles_asked_for_stand_at_their_depth():
    plan = NeedlePlan(needles=1, lengths=(400,), samples=8)
    for item in make_items(tiny_lm.tokenizer(), data.books_text(), plan):
        before, _, after = item.context.partition(needle.needle_sentence(*item.asked[0]))
        parts = needle.split_sentences(before + after)
        # As near as the end of a sentence is, spaces aside.
        furthest = max(map(len, parts)) / 2 + len(parts)
        assert abs(len(before) - item.depth * (len(before) + len(after))) <= furthest
        assert (item.depth != 0.0) or not before
        assert (item.depth != 1.0) or not after


def test_items_are_the_same_again_and_a_first_part_is_balanced(items):
    tokenizer, text = tiny_lm.tokenizer(), data.books_text()
    assert make_items(tokenizer, text, PLAN) == items
    more = make_items(tokenizer, text, replace(PLAN, samples=4))
    assert more[: len(items)] == items
    assert make_items(tokenizer, text, replace(PLAN, seed=1)) != items
    first = items[: len(items) // PLAN.samples]
    assert sorted((item.length, item.depth) for item in first) == [(n, d) for n in PLAN.lengths for d in DEPTHS]


def test_a_length_that_is_named_twice_has_its_items_once():
    once, twice = (Needle.parse("needle", {"lengths": lengths}, 1024) for lengths in [(64, 128), (64, 128, 64)])
    assert once == twice


def test_answers_cannot_be_told_without_the_context():
    numbers = [
        item.asked[0][1]
        for item in make_items(tiny_lm.tokenizer(), data.books_text(), NeedlePlan(lengths=(64,), samples=100))
    ]
    commonest = max(numbers.count(number) for number in numbers)
    assert commonest / len(numbers) < 0.04


def test_sentences_that_a_tokenizer_cannot_spell_are_left_out():
    class Words:
        unk_token_id = 0
        known = ("the", "cat", "sat")

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[int(word.strip(" .") in self.known) for word in t.split()] for t in texts]}

    text = "the cat sat. the dog sat. " * 20
    assert {sentence for sentence, _ in encodable_sentences(Words(), text)} == {"the cat sat."}
    with pytest.raises(UsageError, match="can encode only 3 of the text's 6 sentences"):
        encodable_sentences(Words(), "the cat sat. the dog sat. " * 3)


def test_titles_end_no_sentence():
    assert needle.split_sentences("Mr. Jones and Mrs. Smith\nmet Dr. Who. They left! Why?") == [
        "Mr. Jones and Mrs. Smith met Dr. Who.",
        "They left!",
        "Why?",
    ]


def test_only_what_greedy_decoding_gives_counts():
    (model,) = (path for path in data.pocket_models("needle") if path.name == "needle-diff-v1")
    loaded, tokenizer = load(model, Recipe.of(logits="3:row"), dtype=torch.float32), load_tokenizer(model)
    plan = NeedlePlan(needles=4, lengths=(160,), samples=3)
    items, retrieved = needle.evaluate_needle(TorchModel(loaded, tokenizer), data.books_text(), plan)
    for item, share in zip(items, retrieved, strict=True):
        prompt, answer = item.query_texts()[0]
        ids = torch.tensor([tokenizer.encode(prompt)])
        wanted = tokenizer.encode(prompt + answer)[ids.shape[1] :]
        # Without a mask, transformers takes the tokens that are pad_token_id for padding.
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": len(wanted), "do_sample": False}
        said = loaded.generate(ids, **asked, pad_token_id=0)[0, ids.shape[1] :]
        assert share == float(said.tolist() == wanted)
    # Three bits leave this model some of its needles.
    assert set(retrieved) == {0.0, 1.0}


@in_one_test(
    ("task", "message"),
    [
        ("needle:0", "0 needles"),
        ("needle:2:3", "3 of 2 needles cannot be queried"),
        ("needle:a", "expected needle"),
        ("needle:1:1:1", "expected needle"),
    ],
)
def test_a_malformed_task_is_refused_before_any_cell(task, message, tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    with pytest.raises(UsageError, match=message):
        run_sweep([model], SweepOptions(tasks=(task,)), tmp_path / "out")


def test_a_length_beyond_the_model_or_below_its_needles_is_refused(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    loaded, tokenizer = load(model), load_tokenizer(model)
    with pytest.raises(UsageError, match="prompts of 600 tokens exceed the model's context of 512"):
        needle.evaluate_needle(TorchModel(loaded, tokenizer), data.books_text(), NeedlePlan(lengths=(600,)))
    with pytest.raises(UsageError, match="6 needles do not fit into 40 tokens"):
        needle.evaluate_needle(TorchModel(loaded, tokenizer), data.books_text(), NeedlePlan(needles=6, lengths=(40,)))


def test_a_sweep_pairs_needle_cells_and_counts_them_by_depth_and_length(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    options = SweepOptions(
        tasks=("needle:2", "needle:2:2"),
        bits=(16, 4),
        task_options={"lengths": (120, 160), "limit": 10},
        dtype="float32",
    )
    result = run_sweep([model], options, tmp_path / "out")
    result.require_complete()
    written = write_outputs(result, tmp_path / "out")
    assert {path.name for path in written} == {"table.csv", "plot.png", "report.html"}
    full, low = json_rows(result)
    for task in ("needle:2:1", "needle:2:2"):
        assert full[f"{task} n"] == 10
        assert low[f"{task} difference"] == pytest.approx(low[f"{task} score"] - full[f"{task} score"])
        assert f"{task} retrieved" in result.table()
    for _, cell in result.cells_of(Needle):
        places = {(place["depth"], place["length"]) for place in cell.result.details["by_place"]}
        assert places == {(depth, length) for depth in DEPTHS for length in (120, 160)}
