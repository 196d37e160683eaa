"""The same demonstrations in several orders."""

import pytest

from diffquant.errors import UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks import make_tasks
from diffquant.measure.torch_model import TorchModel
from examples.shots.labelled import Dataset, Example
from examples.shots.protocol import ManyShotPlan, OrderPlan, evaluate_many_shot
from tests.support import tiny_lm
from tests.support.tables import in_one_test

LABELS = ("number", "place", "person")
SHOWN = [Example(f"text number {i}", LABELS[i % 3]) for i in range(30)]
ASKED = [Example(f"question {i}", LABELS[i % 3]) for i in range(8)]


def parts(prompts):
    return [prompt.split("\n\n") for prompt in prompts]


@in_one_test("alternates", [False, True])
def test_every_order_shows_the_same_demonstrations(alternates):
    orders = parts(OrderPlan(12, 5, alternates=alternates).prompts(SHOWN, 12))
    assert len(orders) == len({*map(tuple, orders)}) == 5
    assert len({frozenset(order) for order in orders}) == 1
    # Those that many-shot draws first.
    assert set(orders[0]) == set(ManyShotPlan(12).prompts(SHOWN, 12)[0].split("\n\n"))


def test_an_alternating_order_goes_round_the_classes():
    for order in parts(OrderPlan(12, 4, alternates=True).prompts(SHOWN, 12)):
        labels = [part.rpartition("Type: ")[2] for part in order]
        assert labels[:3] * 4 == labels
        assert len(set(labels[:3])) == 3
    for order in parts(OrderPlan(12, 4).prompts(SHOWN, 12)):
        labels = [part.rpartition("Type: ")[2] for part in order]
        assert labels[:3] * 4 != labels


def test_accuracy_of_each_order_is_that_of_its_prompt_alone(monkeypatch):
    model = TorchModel(tiny_lm.llama(1024), tiny_lm.tokenizer())
    data, plan = Dataset(tuple(SHOWN), tuple(ASKED)), OrderPlan(6, 3)
    outcome = evaluate_many_shot(model, data, plan)
    for number, text in enumerate(plan.prompts(SHOWN, 6)):
        alone = ManyShotPlan(6)
        monkeypatch.setattr(ManyShotPlan, "prompts", lambda *_, text=text: [text])
        assert evaluate_many_shot(model, data, alone).choices == [outcome.choices[number]]
        monkeypatch.undo()


@pytest.fixture
def files(tmp_path):
    for name, examples in (("train", SHOWN), ("test", ASKED)):
        lines = [f'{{"text": "{each.text}", "label": "{each.label}"}}' for each in examples]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}


def test_a_sweep_tells_how_far_the_best_order_is_from_the_worst(files, tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    names = ("shot-order:4:3", "shot-order:4:3:alternate", "shot-order:3:1")
    options = SweepOptions(tasks=names, bits=(16,), task_options=files, dtype="float32")
    sweep = run_sweep([model], options, tmp_path / "out")
    sweep.require_complete()
    (row,) = json_rows(sweep)
    for name in names:
        result = sweep.result_and_baseline(sweep.points[0], name)[0]
        by_order = result.details["by_order"]
        assert len(by_order) == int(name.split(":")[2])
        assert result.score == pytest.approx(sum(by_order) / len(by_order))
        assert row[f"{name} spread"] == pytest.approx(max(by_order) - min(by_order))
    assert row["shot-order:3:1 spread"] == 0
    assert sweep.table().splitlines()[0].count("best - worst") == 3


def test_names_are_read_and_what_they_cannot_be_is_said(files):
    (task,) = make_tasks(["shot-order:6"], files, 4096)
    assert task.name == "shot-order:6:10"
    (alternate,) = make_tasks(["shot-order:6:4:alternate"], files, 4096)
    assert alternate.name == "shot-order:6:4:alternate"
    assert alternate.identity()["name"] != task.identity()["name"]
    for name, message in (
        ("shot-order", "expected shot-order:SHOTS"),
        ("shot-order:all", "expected shot-order:SHOTS"),
        ("shot-order:0", "both must be 1 or more"),
        ("shot-order:31", "train has 30; ask for fewer"),
    ):
        with pytest.raises(UsageError, match=message):
            make_tasks([name], files, 4096)
