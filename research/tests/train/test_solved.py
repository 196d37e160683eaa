"""Steps until solved: what is asked, what counts as an answer, when a run ends, and what it leaves."""

import json
import re
from dataclasses import replace

import pytest
import torch
from scipy import stats

from diffquant import data
from diffquant.errors import UsageError
from research.train import solved
from research.train.needles import Needles
from research.train.settings import Schedule, Settings, Sizes
from research.train.solved_report import report, share_solved, solved_summary
from research.train.train import new_model

DATA = {"frequent": 1500, "most_words": 16, "needles": [1, 2, 4], "brief": 64, "prose": 0.1}
DATA["growth"] = [10, 10**6, 10**6 + 1]
SETTINGS = Settings(
    "needle",
    Sizes(hidden=32, layers=1, heads=4, head_dim=8, inner=80, context=128, init=0.1, bias=True, theta=10000.0),
    Schedule(steps=100, warmup=3, tokens=64, lengths=((0.0, 32),), rate=3e-3, final=1.0),
    DATA,
)


@pytest.fixture(scope="module")
def source():
    return Needles(data.books_text(), 128, **DATA)


@pytest.mark.parametrize("needles", solved.NEEDLES)
def test_a_question_asks_for_one_of_n_cities_and_its_number_is_the_answer(source, needles):
    questions = source.questions(7, 0, 30, 32, needles)
    assert len({source.tokenizer.decode(prompt) for prompt, _ in questions}) == 30
    for prompt, number in questions:
        *told, asked = re.findall(r"(\w+) is(?: (\d+))?", source.tokenizer.decode(prompt))
        assert len(dict(told)) == needles
        assert asked == (asked[0], "")
        assert dict(told)[asked[0]] == source.tokenizer.decode([number])


def test_needles_that_do_not_fit_are_refused(source):
    with pytest.raises(UsageError, match=r"\[6\] needles, 4 tokens each, none fit twice into 32 tokens of 10 cities"):
        source.questions(0, 0, 1, 32, 6)


def test_an_answer_is_what_transformers_generates_greedily(source):
    torch.manual_seed(3)
    model = new_model(
        replace(SETTINGS, model=replace(SETTINGS.model, init=1.0)), "diff-v2", len(source.tokenizer), "cpu"
    )
    questions = [*source.questions(0, 0, 9, 32, 2), *source.questions(0, 1, 9, 32, 4)]
    generated = [
        int(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)[0, -1])
        for ids in (torch.tensor([prompt]) for prompt, _ in questions)
    ]
    asked = [
        (prompt, token if place % 3 else number)
        for place, ((prompt, number), token) in enumerate(zip(questions, generated, strict=True))
    ]
    right = sum(number == token for (_, number), token in zip(asked, generated, strict=True))
    assert 12 <= right < 18
    assert solved.share_answered(model, asked) == right / 18


def test_a_run_ends_when_each_n_is_solved_and_keeps_the_first_step_of_each(source, tmp_path, monkeypatch):
    shares = iter([0.1, 0.2, 0.96, 0.3, 0.5, 0.94, 0.2, 0.95])
    monkeypatch.setattr(solved, "share_answered", lambda model, questions: next(shares))
    monkeypatch.setattr(solved, "_EVERY", 3)
    run = solved.run_until_solved("transformer", SETTINGS, source, "text", tmp_path)
    assert run["solved"] == {"2": 6, "4": 12}
    assert [each["step"] for each in run["evaluations"]] == [3, 6, 9, 12]


def test_a_run_that_ended_unsolved_goes_on_as_one_that_never_ended(source, tmp_path, monkeypatch):
    monkeypatch.setattr(solved, "_EVERY", 2)

    def run_to(steps, folder):
        settings = replace(SETTINGS, schedule=replace(SETTINGS.schedule, steps=steps))
        return solved.run_until_solved("diff-v1", settings, source, "text", tmp_path / folder)

    whole, _ = run_to(6, "whole"), run_to(2, "parts")
    assert whole["solved"] == {"2": None, "4": None}
    assert run_to(6, "parts")["evaluations"] == whole["evaluations"]
    checkpoints = [tmp_path / folder / "diff-v1-seed-0" / "checkpoint.pt" for folder in ("whole", "parts")]
    first, second = (torch.load(file)["masters"] for file in checkpoints)
    assert all(map(torch.equal, first, second))
    monkeypatch.setattr(solved, "Trainer", None)
    assert run_to(6, "parts") == run_to(4, "parts")
    with pytest.raises(UsageError, match="other settings or text"):
        solved.run_until_solved("diff-v1", SETTINGS, source, "other", tmp_path / "parts")


@pytest.mark.parametrize("change", [{"lengths": ((0.0, 32), (0.5, 64))}, {"final": 0.1}])
def test_a_schedule_that_its_number_of_steps_decides_is_refused(change, tmp_path, monkeypatch):
    settings = replace(SETTINGS, schedule=replace(SETTINGS.schedule, **change))
    monkeypatch.setattr(Settings, "read", lambda *_: settings)
    (tmp_path / "text").write_text("It was so.")
    with pytest.raises(UsageError, match="one length"):
        solved.main(tmp_path, tmp_path / "text", tmp_path / "out", None, None, 1, "diff-v1")
    assert not (tmp_path / "out").exists()


def invented(kind, *solved_at, limit=100):
    evaluations = [
        {"step": step, "retrieved": {"2": two, "4": four}} for step, two, four in ((50, 0.5, 0.2), (limit, 0.9, 0.9))
    ]
    return [{"kind": kind, "evaluations": evaluations, "solved": {"2": step, "4": step}} for step in solved_at]


def test_the_median_counts_runs_that_were_not_solved(tmp_path, capsys):
    runs = [
        *invented("transformer", None, 50, None),
        *invented("diff-v1", 10, 30, 20),
        *invented("diff-v2", 40, None, 20),
    ]
    lines = [re.split(r"\s{2,}", line) for line in solved_summary(runs).splitlines()[2:]]
    assert lines[1] == ["transformer", "4", "3", "1", "> 100", "50", "> 100"]
    assert lines[3] == ["diff-v1", "4", "3", "3", "20", "10", "30"]
    assert lines[5] == ["diff-v2", "4", "3", "2", "40", "20", "> 100"]
    for number, run in enumerate(runs):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "retrieved.json").write_text(json.dumps(run))
    report(tmp_path)
    assert capsys.readouterr().out.splitlines() == solved_summary(runs).splitlines()
    assert (tmp_path / "solved.png").stat().st_size > 10_000


def test_the_share_solved_is_kaplan_and_meiers():
    runs = [
        run
        for step, end in ((30, 90), (None, 50), (60, 60), (None, 40), (30, 70))
        for run in invented("diff-v1", step, limit=end)
    ]
    steps, shares = share_solved(runs, "diff-v1", "2")
    data = stats.CensoredData(uncensored=[30, 60, 30], right=[50, 40])
    expected = stats.ecdf(data).cdf.evaluate([0, 30, 60, 90])
    assert steps == [0, 30, 60, 90]
    assert shares == pytest.approx(expected)
