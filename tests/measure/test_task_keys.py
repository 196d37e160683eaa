"""Cells that exist are recognized: identities and results read as they were written when the first ones were made."""

import json

import pytest

from diffquant.errors import UsageError
from diffquant.measure import tasks as registry
from diffquant.measure.results import TaskResult
from diffquant.measure.tasks import make_tasks, task_class_named, task_options
from examples.shots.nll import Nll
from tests.support.earlier_results import SWEEPS, recorded
from tests.support.tables import in_one_test

# Cells that people keep have these in their keys.
HELLASWAG = {"name": "hellaswag", "shots": 0, "n": 3, "items": "81e59b7cd841015b", "batch_tokens": 4096}
PERPLEXITY = {"name": "perplexity", "text": "8ad6d9787cdd74ae", "characters": 700, "window": 64, "stride": 16}
PERPLEXITY |= {"batch_tokens": 4096}
NEEDLE = {"name": "needle:4:2", "items": 2, "text": "1cd49f71124d27bc", "lengths": [64, 96], "samples": 50}
NEEDLE |= {"seed": 0, "limit": 8, "batch_tokens": 4096}


def identity(name, **options):
    (task,) = make_tasks([name], options, 4096)
    return task.identity()


def test_identities_are_pinned():
    assert identity("hellaswag", limit=3) == HELLASWAG
    assert identity("perplexity", characters=700, window=64, stride=16) == PERPLEXITY
    assert identity("needle:4:2", lengths=(64, 96), limit=8) == NEEDLE
    harness = identity("lm-eval:arc_easy", limit=5)
    assert harness.pop("lm_eval")
    assert harness == {"name": "lm-eval:arc_easy", "limit": 5, "batch_tokens": 4096}


def test_a_task_that_is_named_in_two_ways_is_measured_once():
    tasks = make_tasks(["needle", "perplexity", "needle:1", "needle:1:1"], {}, 1)
    assert [task.name for task in tasks] == ["needle:1:1", "perplexity"]


@pytest.fixture
def _nll_is_known(monkeypatch):
    """One recorded sweep is of a task that examples has."""
    registry.task_kinds()
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    registry.register(Nll)


@pytest.mark.usefixtures("_nll_is_known")
@in_one_test("name", SWEEPS)
def test_recorded_cells_read_and_write_as_they_are(name):
    cells = json.loads(recorded(name))["cells"]
    assert cells
    for cell in cells:
        result = TaskResult.from_dict(cell["result"])
        assert result.to_cell() == cell["result"]
        # What is compared with itself has no difference, and what is compared with nothing no KL.
        metrics = task_class_named(cell["task"]).columns.plotted_metrics
        drawn = [each for each in (metric.estimate(result, result) for metric in metrics) if each]
        assert all(each.low <= each.mean <= each.high for each in drawn)
        assert drawn or cell["bits"] == 16


@pytest.mark.usefixtures("_nll_is_known")
@in_one_test("name", SWEEPS)
def test_recorded_identities_are_those_of_today(name):
    """Of the tasks whose data ship: the same options give the same identity."""
    settings = json.loads(recorded(name))["settings"]
    options = {name: settings["options"][name] for name in ("limit", "characters", "window", "stride")}
    options["lengths"] = tuple(settings["options"].get("lengths", (256,)))
    if settings["options"]["items"] or settings["options"]["text"]:
        pytest.skip("its data do not ship")
    tasks = make_tasks([task["name"] for task in settings["tasks"]], options, settings["options"]["batch_tokens"])
    assert [task.identity() for task in tasks] == [_in_todays_format(task) for task in settings["tasks"]]


def _in_todays_format(identity):
    """An identity that was recorded; of needles in items of format 1 too, which pages that show them say."""
    if not identity["name"].startswith("needle"):
        return identity
    assert identity["items"] in (1, 2)
    return identity | {"items": 2}


def test_an_option_that_no_task_has_is_refused():
    with pytest.raises(UsageError, match="limit would not affect perplexity; choose from characters, stride"):
        make_tasks(["perplexity"], {"limit": 5, "characters": 5000}, 4096)
    with pytest.raises(UsageError, match="characters, window would not affect hellaswag"):
        make_tasks(["hellaswag"], {"limit": 5, "characters": 5000, "window": 64}, 4096)
    every_default = {option.name: option.default for option in task_options()}
    assert len(make_tasks(["perplexity", "hellaswag"], every_default | {"limit": 5, "window": 1000}, 4096)) == 2
