"""A task of three items that only this file knows: registered, swept, tabulated, and offered by the command line."""

import json
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from diffquant.errors import UsageError
from diffquant.measure import tasks
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.scoring import score
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.outputs import write_outputs
from diffquant.measure.sweep.plot import list_panel_rows
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.measure.task import LIMIT, Task, TaskOption
from tests.support import tiny_lm

SHOUT = TaskOption("shout", False, "Ask in capitals.", bool)
QUESTIONS = (("The sky is", (" blue", " loud")), ("Grass is", (" green", " late")), ("Snow is", (" white", " round")))


@dataclass(frozen=True, kw_only=True)
class Colours(Task):
    """Which of two words follows, by likelihood."""

    kind: ClassVar = "colours"
    usage: ClassVar = "colours"
    options: ClassVar = (SHOUT,)
    columns: ClassVar = ITEMS

    shout: bool

    @classmethod
    def parse(cls, name, values, batch_tokens):
        if name != cls.kind:
            raise cls.make_name_error(name)
        return cls(shout=SHOUT.value_in(values), batch_tokens=batch_tokens)

    def identity(self):
        return {"name": self.name, "shout": self.shout, "batch_tokens": self.batch_tokens}

    def run(self, model, reference, progress):
        encoder = RequestEncoder(model.tokenizer, model.max_length, model.vocabulary_size)
        asked = [(q.upper() if self.shout else q, word) for q, words in QUESTIONS for word in words]
        logprobs = [logprob for logprob, _ in score(model, encoder.encode_requests(asked), self.batch_tokens, progress)]
        choices = [int(wrong > right) for right, wrong in zip(logprobs[::2], logprobs[1::2], strict=True)]
        values = [1 - choice for choice in choices]
        return TaskResult(metric="acc", score=sum(values) / 3, n=3, values=values, choices=choices)


@pytest.fixture
def known(monkeypatch):
    """The task in a registry that is put back."""
    tasks.task_kinds()
    monkeypatch.setattr(tasks, "_KINDS", dict(tasks._KINDS))
    tasks.register(Colours)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.usefixtures("known")
def test_a_registered_task_is_swept_tabulated_and_drawn(model, tmp_path):
    options = SweepOptions(tasks=("colours",), bits=(16, 2), task_options={"shout": True}, dtype="float32")
    result = run_sweep([model], options, tmp_path)
    result.require_complete()
    full, low = json_rows(result)
    assert full["colours n"] == 3
    assert low["colours difference"] == pytest.approx(low["colours score"] - full["colours score"])
    assert "colours acc" in result.table().splitlines()[0]
    change, score = list_panel_rows(result)
    assert [point.x for point in change.lines["attention logits, per row"][0].points] == [2]
    assert score.lines["attention logits, per row"][0].full.y == 100 * full["colours score"]
    assert "plot.png" in {path.name for path in write_outputs(result, tmp_path)}
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written["cells"][0]["result"]["values"] == result.cells[0].result.values
    assert written["settings"]["options"]["shout"] is True
    assert evaluate(model, None, options)["colours"] == result.cells[0].result


@pytest.mark.usefixtures("known")
def test_its_option_is_part_of_the_address_and_of_no_other_task(model, tmp_path):
    for shout in (False, True):
        options = SweepOptions(tasks=("colours",), bits=(16,), task_options={"shout": shout}, dtype="float32")
        run_sweep([model], options, tmp_path).require_complete()
    assert len(list((tmp_path / "cells").iterdir())) == 2


@pytest.mark.usefixtures("known")
def test_a_kind_twice_and_an_option_that_means_two_things_are_refused():
    with pytest.raises(ValueError, match="'colours' is registered twice"):
        tasks.register(Colours)

    class Other(Colours):
        kind = "other"
        options = (LIMIT, TaskOption("shout", "loudly", "How to ask.", str))

    with pytest.raises(ValueError, match="different options named shout"):
        tasks.register(Other)


def test_without_it_neither_task_nor_option_is_known(model, tmp_path):
    with pytest.raises(UsageError, match=r"unknown task 'hellaswg'; did you mean 'hellaswag'\?"):
        tasks.make_tasks(("hellaswg",), {}, 64)
    with pytest.raises(UsageError, match="unknown task 'colours'; choose from hellaswag, lm-eval:NAME"):
        run_sweep([model], SweepOptions(tasks=("colours",)), tmp_path / "out")
    with pytest.raises(UsageError, match="no task has an option shout"):
        SweepOptions(task_options={"shout": True})


@pytest.mark.usefixtures("known")
def test_the_command_line_offers_its_option_and_passes_it_on(model, monkeypatch, capsys):
    import typer

    from diffquant.verbs.arguments import read_task_options
    from diffquant.verbs.cli.command import make_command
    from diffquant.verbs.cli.show import VIEWS, ResultView

    def show(**task_options: object) -> str:
        """Show options.

            diffquant show

        No more.
        """
        return json.dumps(read_task_options(task_options, show), default=str)

    monkeypatch.setitem(VIEWS, "show", ResultView(lambda text, _: text, data=None))
    app = typer.Typer()
    app.command()(make_command(show))
    monkeypatch.setattr(sys, "argv", ["show", "--shout", "--lengths", "32,64", "--characters", "0"])
    with pytest.raises(SystemExit):
        app()
    given = json.loads(capsys.readouterr().out)
    assert (given["shout"], given["lengths"], given["characters"], given["window"]) == (True, [32, 64], None, 1024)
