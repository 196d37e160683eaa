"""Tasks of lm-eval: scored as lm-eval's own model scores them, and compared item by item in a sweep."""

import importlib.util

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.measure.protocols import hellaswag
from diffquant.measure.protocols.harness_plugin import HarnessModel
from diffquant.measure.protocols.hellaswag import HellaSwagItem
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.torch_model import TorchModel
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.harness_task import NAME, harness, write_task
from tests.support.tables import in_one_test


@pytest.fixture
def task_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return write_task(tmp_path, hellaswag.load_items(limit=12))


def instances(kind, arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def ours_and_theirs(max_length=512):
    model, tokenizer = tiny_lm.llama(max_length), tiny_lm.tokenizer()
    return HarnessModel(TorchModel(model, tokenizer), 4096, report_nothing), HFLM(pretrained=model, tokenizer=tokenizer)


def test_a_local_task_scores_as_hflm_scores_it(task_file):
    ours, theirs = ours_and_theirs()
    result = harness(str(task_file), limit=9).run(ours.model, None, report_nothing)
    manager = TaskManager(include_path=str(task_file.parent), include_defaults=False)
    expected = simple_evaluate(model=theirs, tasks=[NAME], limit=9, task_manager=manager, bootstrap_iters=0)
    assert result.metric == "acc_norm"
    assert result.n == len(result.values) == 9
    assert result.score == pytest.approx(expected["results"][NAME]["acc_norm,none"])
    by_document = {sample["doc_id"]: sample["acc_norm"] for sample in expected["samples"][NAME]}
    assert result.values == [by_document[i] for i in range(9)]


def test_rolling_likelihoods_are_hflms():
    ours, theirs = ours_and_theirs(max_length=40)
    texts = [("",), ("Short.",), ("A text that is longer than the model can see at once. " * 6,)]
    expected = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts[1:]), disable_tqdm=True)
    assert ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) == pytest.approx(
        [0, *expected], abs=1e-3
    )


@in_one_test("until", [["e"], [".", "\n"], []])
def test_generation_stops_where_hflms_does(until):
    ours, theirs = ours_and_theirs()
    asked = [("He took the", {"until": until, "max_gen_toks": 12}), ("The", {"until": until, "max_gen_toks": 12})]
    expected = theirs.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert ours.generate_until(instances("generate_until", asked)) == expected


def test_an_answer_that_leaves_no_room_for_its_prompt_is_refused_as_hflm_refuses_it():
    ours, theirs = ours_and_theirs(max_length=40)
    asked = instances("generate_until", [("He took the", {"until": ["."], "max_gen_toks": 40})])
    with pytest.raises(AssertionError, match="Invalid configuration"):
        theirs.generate_until(asked, disable_tqdm=True)
    with pytest.raises(UsageError, match="max_gen_toks 40 leaves no tokens for a prompt: the model's context has 40"):
        ours.generate_until(asked)


def test_a_file_that_names_no_task_is_refused(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("dataset_path: json\n")
    with pytest.raises(UsageError, match="finds no task in"):
        harness(str(path)).run(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), None, report_nothing)


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        harness("arc_easy").run(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), None, report_nothing)


def test_a_harness_task_is_compared_with_16_bits_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    items = [HellaSwagItem(f"Number {i} is", ("even", "odd", "large"), i % 2) for i in range(8)]
    model = tiny_lm.write_llama(tmp_path / "model")
    task = f"lm-eval:{write_task(tmp_path, items, ['acc'])}"
    options = SweepOptions(tasks=(task,), bits=(2,), dtype="float32", task_options={"trust_task": True})
    result = run_sweep([model], options, tmp_path / "out")
    result.require_complete()
    full, low = json_rows(result)
    assert full[f"{task} metric"] == "acc"
    assert full[f"{task} n"] == 8
    assert full[f"{task} score"] + low[f"{task} difference"] == low[f"{task} score"]
    assert low[f"{task} difference_low"] < low[f"{task} difference_high"]
    assert f"{task} acc" in result.table()
