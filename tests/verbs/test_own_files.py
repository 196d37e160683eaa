"""Every verb that writes goes by one rule: what diffquant did not write is not replaced, even with --overwrite."""

import sys

import pytest
import typer

from diffquant import data
from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.run import PARTS
from diffquant.errors import OutputExistsError
from diffquant.support.outputs import RunFiles, check_replaceable
from diffquant.verbs.cli import app, main
from tests.support import tiny_lm

COMMANDS = typer.main.get_command(app).commands
FOREIGN = b"somebody's own\n"
# Each verb that writes, with what it is given before its output.
FOLDERS = {
    name: line.split()
    for name, line in {
        "quantize": "quantize MODEL --weights 8:row",
        "convert": "convert LLAMA --to diff-v2",
        "export": "export MODEL",
        "search": "search MODEL --budget 6 --windows 1 --window 32 --characters 400 --bits 8,4 --granularity row",
        "sweep": "sweep MODEL --task perplexity --bits 4 --characters 400 --window 32 --stride 32",
        "outliers": "outliers MODEL --tokens 128 --window 64",
        "bench": "bench attention",
        "fidelity": "fidelity MODEL MODEL --characters 400 --context 16",
    }.items()
}
FILES = {"calibrate": ("calibrate", "MODEL", "--tokens", "256", "--window", "64"), "report": ("report", "RUNS")}
# The demo is a chain of verbs.
CHAINS = {"demo"}
READS_ONLY = {"plan", "eval", "compare", "generate", "serve", "verify", "run", "inspect", "doctor"}


def test_every_verb_that_has_an_output_is_held_to_the_rule_below():
    writing = {name for name, verb in COMMANDS.items() if any("--output" in option.opts for option in verb.params)}
    assert writing == FOLDERS.keys() | FILES.keys() | CHAINS
    assert COMMANDS.keys() == writing | READS_ONLY


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Paths by the words that stand for them."""
    place = tmp_path_factory.mktemp("models")
    model = tiny_lm.write_diff_v2(place / "model")
    return {"MODEL": model, "LLAMA": tiny_lm.write_llama(place / "llama"), "POCKET": data.pocket_models("needle")[0]}


@pytest.fixture
def _quick_bench(monkeypatch):
    """A bench that measures nothing, and draws both of its plots."""
    cells = [
        BenchCell("attention", f"{n} tokens", "dense", values=(1.0, 2.0), peak_bytes=n, length=n) for n in (16, 32)
    ]
    monkeypatch.setitem(PARTS, "attention", lambda _: {"dense": lambda _: cells})


@pytest.fixture
def run(capsys, monkeypatch, given, _quick_bench):
    def call(arguments, output, runs=None):
        words = [str((given | {"RUNS": runs}).get(word, word)) for word in arguments]
        overwrite = ["--overwrite"] if any("--overwrite" in each.opts for each in COMMANDS[words[0]].params) else []
        monkeypatch.setattr(sys, "argv", ["diffquant", *words, "-o", str(output), *overwrite])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, capsys.readouterr().err

    return call


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_somebodys_files_is_left_as_it_is(name, run, tmp_path):
    own = tmp_path / "own"
    code, said = run(FOLDERS[name], own)
    assert code == 0, said
    # A cell and a journal are named for a digest of what they hold.
    names = [file.name for file in own.iterdir() if file.is_file() and not file.name.startswith("measured-")]
    assert len(names) > 1
    for number, each in enumerate(names):
        place = tmp_path / str(number)
        place.mkdir()
        (place / each).write_bytes(FOREIGN)
        code, said = run(FOLDERS[name], place)
        assert (code, f"holds {each}, which diffquant did not write" in said) == (1, True), (each, said)
        assert {file.name: file.read_bytes() for file in place.iterdir()} == {each: FOREIGN}
    assert run(FOLDERS[name], own)[0] == 0


@pytest.mark.parametrize("name", FILES)
def test_somebodys_file_is_left_as_it_is(name, run, tmp_path):
    runs = tmp_path / "runs"
    assert run(FOLDERS["outliers"], runs)[0] == 0
    file = tmp_path / "file.html"
    file.write_bytes(FOREIGN)
    code, said = run(FILES[name], file, runs)
    assert (code, "holds file.html, which diffquant did not write" in said) == (1, True), said
    assert file.read_bytes() == FOREIGN
    file.unlink()
    for _ in range(2):
        assert run(FILES[name], file, runs)[0] == 0


def test_somebodys_link_and_folder_count_as_theirs(tmp_path):
    files = RunFiles("run.json", frozenset({"cells"}), ("plot.png", "table.csv"))
    (tmp_path / "plot.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "table.csv").mkdir()
    with pytest.raises(OutputExistsError, match=r"holds plot\.png, table\.csv, which"):
        files.check(tmp_path)
    for content in ("[]", "{}", '{"cells"', '"cells"'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(OutputExistsError, match=r"holds plot\.png, run\.json, table\.csv, which"):
            files.check(tmp_path)
    (tmp_path / "run.json").write_text('{"cells": []}')
    files.check(tmp_path)


def test_many_files_are_counted(tmp_path):
    with pytest.raises(OutputExistsError, match="holds 0, 1, 2, 3, 4, and 2 more, which"):
        check_replaceable(tmp_path, map(str, range(7)), [])
