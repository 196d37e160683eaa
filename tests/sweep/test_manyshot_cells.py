"""The many-shot task in a sweep: from files to cells, table and plot."""

import json
import sys
from dataclasses import replace

import pytest

from diffquant import data
from diffquant.cli import main
from diffquant.errors import UsageError
from diffquant.evals.plots.shots import shots_panels
from diffquant.evals.protocols import many_shot, needle
from diffquant.evals.tasks import make_tasks
from diffquant.evals.tasks.many_shot import ManyShot
from diffquant.recipe import Recipe
from diffquant.sweep import SweepOptions, run_sweep, write_outputs
from diffquant.sweep.evaluate import evaluate
from diffquant.sweep.outputs import plotted_cells
from diffquant.sweep.table import json_rows, text_table
from tests.support import tiny_lm

LABELS = ("DESC:def", "DESC:reason", "NUM:dist", "NUM:money", "HUM:ind")


@pytest.fixture
def files(tmp_path):
    """TREC's lines: 30 to show, 20 to ask for."""
    texts = [s for s in needle.sentences(data.books_text()) if 12 < len(s) < 40][:50]
    lines = [f"{LABELS[i % len(LABELS)]} {text}\n" for i, text in enumerate(texts)]
    train, test = tmp_path / "train_5500.label", tmp_path / "TREC_10.label"
    train.write_text("".join(lines[:30]))
    test.write_text("".join(sorted(lines[30:])))
    return {"train": train, "test": test}


@pytest.fixture
def model(tmp_path):
    return tiny_lm.write_llama(tmp_path / "model")


def options(files, *shots, **changes):
    tasks = tuple(f"many-shot:{each}" for each in shots)
    grid = {name: changes.pop(name) for name in ("bits", "batch_tokens") if name in changes}
    return SweepOptions(**{"tasks": tasks, "bits": (16, 3), "dtype": "float32", **grid}, task_options=files | changes)


def test_a_sweep_pairs_cells_and_draws_accuracy_against_shots(files, model, tmp_path):
    result = run_sweep([model], options(files, 3, "3:2", "all:2"), tmp_path / "out")
    result.require_complete()
    written = write_outputs(result, tmp_path / "out")
    assert {path.name for path in written} == {"table.csv", "plot.png", "report.html", "shots.png"}
    full, low = json_rows(result)
    for task in ("many-shot:3:1", "many-shot:3:2", "many-shot:all:2"):
        assert full[f"{task} n"] == 20
        assert low[f"{task} difference"] == pytest.approx(low[f"{task} score"] - full[f"{task} score"])
        assert f"{task} acc" in text_table(result)
    assert low["many-shot:3:1 gained"] - low["many-shot:3:1 lost"] == pytest.approx(
        20 * low["many-shot:3:1 difference"]
    )
    assert f"+{low['many-shot:3:1 gained']} -{low['many-shot:3:1 lost']} " in text_table(result)
    assert isinstance(low["many-shot:3:1 gained"], int)
    # Of several answers a text none is the one that flipped.
    assert low["many-shot:all:2 gained"] is None
    most = result.cells[2].result.shots
    assert 3 < most <= 30
    assert f"20 items, many-shot after 3, {most} demonstrations" in text_table(result)
    drawn = shots_panels(plotted_cells(result, ManyShot))
    assert list(drawn) == ["attention logits, per row"]
    at_16, at_3 = drawn["attention logits, per row"]
    assert (at_16.scheme, at_3.scheme) == ("16", "3:row")
    assert [shots for shots, _, _ in at_3.points] == [3, most]
    assert at_16.points[1][1:] == (
        pytest.approx(100 * full["many-shot:all:2 score"]),
        pytest.approx(100 * full["many-shot:all:2 se"]),
    )


def test_one_number_of_shots_is_no_plot(files, model, tmp_path):
    result = run_sweep([model], options(files, 3, limit=4), tmp_path / "out")
    assert not shots_panels(plotted_cells(result, ManyShot))
    assert "shots.png" not in {path.name for path in write_outputs(result, tmp_path / "out")}


def test_cells_that_are_there_are_not_measured_again(files, model, tmp_path, monkeypatch):
    measured = []
    evaluate_ = many_shot.evaluate_many_shot

    def counted(*arguments):
        measured.append(arguments[2].shots)
        return evaluate_(*arguments)

    monkeypatch.setattr(many_shot, "evaluate_many_shot", counted)
    for shots in ([3], [3, 6]):
        run_sweep([model], options(files, *shots, bits=(16,), limit=4), tmp_path / "out").require_complete()
    assert measured == [3, 6]


def test_a_cell_depends_on_what_is_shown_and_asked_and_not_on_where_it_lies(files, tmp_path):
    def identity(shots=3, **changes):
        asked = options(files, shots, limit=4, **changes)
        (task,) = make_tasks(asked.tasks, asked.task_options, asked.pass_tokens("cpu"))
        return json.dumps(task.identity(), sort_keys=True)

    first = identity()
    different = [identity(6), identity("all"), identity("3:2"), identity(fine=True), identity(batch_tokens=64)]
    files["test"] = files["test"].rename(tmp_path / "moved.label")
    assert identity() == first
    for file in files.values():
        file.write_text(file.read_text().replace("the", "a", 1))
        different.append(identity())
    assert len({first, *different}) == 1 + len(different)


def test_the_same_cell_measured_again_is_the_same(files, model, tmp_path):
    results = [run_sweep([model], options(files, "6:2", limit=8), tmp_path / name).cells for name in "ab"]
    assert results[0]
    for a, b in zip(*results, strict=True):
        assert replace(a.measurement, seconds=0) == replace(b.measurement, seconds=0)


def test_one_configuration_is_that_of_the_sweep(files, model, tmp_path):
    cell = run_sweep([model], options(files, 6), tmp_path / "out").cells[1]
    alone = evaluate(model, Recipe.of(logits="3:row"), options(files, 6))["many-shot:6:1"]
    assert alone == cell.result
    assert alone.details["classes"] == ["description", "human", "numeric"]


def test_demonstrations_beyond_the_context_fail_their_cell_alone(files, model, tmp_path):
    files["train"].write_text(files["train"].read_text() * 3)
    result = run_sweep([model], options(files, 3, 90, limit=4), tmp_path / "out")
    assert [cell.task for cell in result.failed] == ["many-shot:90:1"] * 2
    assert "the model sees 512; ask for fewer, or for many-shot:all" in result.failed[0].error


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("many-shot", "expected many-shot:SHOTS"),
        ("many-shot:few", "expected many-shot:SHOTS"),
        ("many-shot:3:2:1", "expected many-shot:SHOTS"),
        ("many-shot:0", "0 demonstrations"),
        ("many-shot:all:0", "0 draws"),
        ("many-shot:31", "31 demonstrations are asked for and train has 30"),
    ],
)
def test_a_malformed_task_is_refused_before_any_cell(task, message, files, model, tmp_path):
    with pytest.raises(UsageError, match=message):
        run_sweep([model], SweepOptions(tasks=(task,), task_options=files), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_data_the_options_are_named_and_bad_data_is_named_once(files, model, tmp_path):
    with pytest.raises(UsageError, match="give train and test"):
        run_sweep([model], SweepOptions(tasks=("many-shot:3",)), tmp_path / "out")
    files["test"].write_text("Who was it?\n")
    with pytest.raises(UsageError, match="1 lines of") as caught:
        run_sweep([model], options(files, 3, 6), tmp_path / "out")
    assert str(caught.value).count("line 1") == 1


@pytest.mark.parametrize("verb", ["eval", "sweep"])
def test_the_command_line_takes_files_and_fine_labels(verb, files, model, tmp_path, monkeypatch, capsys):
    given = ["--train", files["train"], "--test", files["test"], "--fine", "--limit", 4, "--dtype", "float32", "--json"]
    output = ["-o", tmp_path / "out", "--bits", 16] if verb == "sweep" else []
    arguments = ["diffquant", verb, model, "--task", "many-shot:3", *given, *output]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    with pytest.raises(SystemExit):
        main()
    said = json.loads(capsys.readouterr().out)
    result = said["cells"][0]["result"] if verb == "sweep" else said["many-shot:3:1"]
    assert (result["n"], result["shots"]) == (4, 3)
    assert "description reason" in result["classes"]
