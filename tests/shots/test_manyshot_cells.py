"""The many-shot task in a sweep: from files to cells, table and plot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffquant import data
from diffquant.errors import UsageError
from diffquant.measure.protocols import needle
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.outputs import write_outputs
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks import make_tasks
from examples.shots.many_shot import ManyShot
from examples.shots.plot import shots_panels
from tests.support import tiny_lm
from tests.support.thorough import sampled

ROOT = Path(__file__).parents[2]
LABELS = ("DESC:def", "DESC:reason", "NUM:dist", "NUM:money", "HUM:ind")


@pytest.fixture
def files(tmp_path):
    """TREC's lines: 30 to show, 20 to ask for."""
    texts = [s for s in needle.split_sentences(data.books_text()) if 12 < len(s) < 40][:50]
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
        assert f"{task} acc" in result.table()
    assert low["many-shot:3:1 gained"] - low["many-shot:3:1 lost"] == pytest.approx(
        20 * low["many-shot:3:1 difference"]
    )
    assert f"+{low['many-shot:3:1 gained']} -{low['many-shot:3:1 lost']} " in result.table()
    assert isinstance(low["many-shot:3:1 gained"], int)
    # Of several answers a text none is the one that flipped.
    assert low["many-shot:all:2 gained"] is None
    most = result.cells[2].result.details["shots"]
    assert 3 < most <= 30
    assert f"20 items, many-shot after 3, {most} demonstrations" in result.table()
    drawn = shots_panels(result.cells_of(ManyShot))
    assert list(drawn) == ["attention logits, per row"]
    at_16, at_3 = drawn["attention logits, per row"]
    assert (at_16.scheme, at_3.scheme) == ("16", "3:row")
    assert [point.x for point in at_3.points] == [3, most]
    score, error = (100 * full[f"many-shot:all:2 {name}"] for name in ("score", "se"))
    assert at_16.points[1][1:4] == pytest.approx((score, score - error, score + error))


def test_a_cell_depends_on_what_is_shown_and_asked_and_not_on_where_it_lies(files, tmp_path):
    def identity(shots=3, **changes):
        asked = options(files, shots, limit=4, **changes)
        (task,) = make_tasks(asked.tasks, asked.task_options, asked.batch_tokens_for("cpu"))
        return json.dumps(task.identity(), sort_keys=True)

    first = identity()
    different = [identity(6), identity("all"), identity("3:2"), identity(fine=True), identity(batch_tokens=64)]
    files["test"] = files["test"].rename(tmp_path / "moved.label")
    assert identity() == first
    for file in files.values():
        file.write_text(file.read_text().replace("the", "a", 1))
        different.append(identity())
    assert len({first, *different}) == 1 + len(different)


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


@pytest.mark.parametrize("verb", sampled(["eval", "sweep"], 2))
def test_the_command_line_takes_files_and_fine_labels(verb, files, model, tmp_path):
    given = ["--train", files["train"], "--test", files["test"], "--fine", "--limit", 4, "--dtype", "float32", "--json"]
    output = ["-o", tmp_path / "out", "--bits", 16] if verb == "sweep" else []
    command = [sys.executable, "-m", "examples.shots", verb, model, "--task", "many-shot:3", *given, *output]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    result = said["cells"][0]["result"] if verb == "sweep" else said["many-shot:3:1"]
    assert (result["n"], result["shots"]) == (4, 3)
    assert "description reason" in result["classes"]
