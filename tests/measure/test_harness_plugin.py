"""diffquant as a model of lm-eval: what its command line passes, and the numbers that come back."""

import importlib
import tomllib
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from diffquant.errors import NotFiredError, UsageError
from diffquant.measure.protocols import hellaswag
from diffquant.measure.protocols.harness_plugin import DiffQuantLM
from diffquant.measure.task import BATCH_TOKENS
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.harness_task import NAME, write_task
from tests.support.tables import in_one_test

ROOT = Path(__file__).parents[2]
ITEMS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("plugin") / "model")


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    """A folder with a task of lm-eval over the first HellaSwag items that ship."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return write_task(tmp_path, hellaswag.load_items(limit=ITEMS)).parent


def instances(kind, arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def from_text(checkpoint, arguments="", **others):
    """The model as lm-eval's command line makes it, which is given these others apart."""
    return DiffQuantLM.create_from_arg_string(f"pretrained={checkpoint},dtype=float32,{arguments}", others)


def test_the_entry_point_names_a_model_of_lm_eval():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["diffquant"].partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), LM)


def evaluated(folder, model, **arguments):
    """Scores of the folder's task, and its samples in order."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    output = simple_evaluate(model=model, tasks=[NAME], task_manager=manager, bootstrap_iters=0, **arguments)
    return output["results"][NAME], sorted(output["samples"][NAME], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize(
    ("text", "recipe"),
    [("4:g16", Recipe.of(weights="4:g16")), ("recipe.yaml", Recipe.of(kv=4, logits="4:tensor"))],
    ids=["weights", "file"],
)
def test_by_name_and_text_it_gives_the_numbers_of_our_own_hellaswag(checkpoint, task_folder, monkeypatch, text, recipe):
    monkeypatch.chdir(task_folder)
    Path("recipe.yaml").write_text(recipe.to_yaml())
    arguments = f"pretrained={checkpoint},dtype=float32,recipe={text}"
    scores, samples = evaluated(task_folder, "diffquant", model_args=arguments, batch_size="auto", device="cpu")
    model = TorchModel(load(checkpoint, recipe, "float32", "cpu"), tiny_lm.tokenizer())
    ours = hellaswag.evaluate_hellaswag(model, hellaswag.load_items(limit=ITEMS))
    answers = [[round(float(logprob), 5) for ((logprob, _),) in sample["resps"]] for sample in samples]
    assert answers == ours.details["logprobs"]
    assert scores["acc,none"] == pytest.approx(ours.details["acc"])
    assert scores["acc_norm,none"] == pytest.approx(ours.score)


@in_one_test(
    ("given", "tokens"),
    [
        ({"batch_size": "auto"}, BATCH_TOKENS),
        ({"batch_size": "auto:4"}, BATCH_TOKENS),
        ({"batch_size": "auto", "max_batch_size": 2}, 2 * 512),
        ({"batch_size": 1}, 512),
        ({"batch_size": "3"}, 3 * 512),
        ({}, BATCH_TOKENS),
    ],
)
def test_a_batch_size_counts_sequences_of_the_models_length(checkpoint, given, tokens):
    assert from_text(checkpoint, **given).batch_tokens == tokens


@in_one_test("batch_size", [0, "-1", "automatic", 1.5])
def test_another_batch_size_is_refused(checkpoint, batch_size):
    with pytest.raises(UsageError, match="batch_size"):
        from_text(checkpoint, batch_size=batch_size)


def test_lm_evals_default_device_is_the_processor_where_there_is_no_other(checkpoint, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert from_text(checkpoint, device="cuda:0").device.type == "cpu"
    with pytest.raises(UsageError, match="finds no CUDA device"):
        from_text(checkpoint, device="cuda:1")


def test_a_model_spread_over_memory_and_disk_answers_alike(checkpoint, tmp_path):
    asked = instances("loglikelihood", [("He took the", " road."), ("The", " end of it")])
    places = {"": "cpu", "model.layers.1": "disk"}
    spread = DiffQuantLM(checkpoint, "4:g16", dtype="float32", device_map=places, offload_folder=tmp_path)
    assert spread.loglikelihood(asked) == from_text(checkpoint, "recipe=4:g16").loglikelihood(asked)


def test_logits_that_no_layer_quantized_are_no_answer(checkpoint, monkeypatch):
    model = from_text(checkpoint, "recipe=paper")
    monkeypatch.setattr("diffquant.measure.protocols.harness_plugin.score", lambda *_: [(0.0, True)])
    with pytest.raises(NotFiredError, match="layers 0, 1"):
        model.loglikelihood(instances("loglikelihood", [("He", " went")]))
