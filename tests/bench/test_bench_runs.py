"""The command line, timing in turns, memory, and runs of sections."""

import gc
import json
import weakref
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from typer.testing import CliRunner

from diffquant.benchmarks import measuring, run
from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.run import BenchOptions
from diffquant.errors import FailedCellsError, UsageError
from diffquant.verbs.cli import app
from tests.support.tables import in_one_test


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 2.0 for name in "ab"}
    assert measuring.run_in_turns(calls, 2) == {"a": [2.0, 2.0], "b": [2.0, 2.0]}
    assert order == ["a", "b", "a", "b"]


def test_a_short_call_runs_often_enough_to_be_timed():
    ran = []
    turn = measuring.make_timer(lambda: ran.append(1))
    before = len(ran)
    assert turn() > 0
    assert len(ran) - before > 100


def test_a_graph_keeps_what_it_was_captured_of(monkeypatch):
    """It knows addresses alone, and nobody else may keep the tensors there."""
    read, replayed = torch.ones(3), []
    there = weakref.ref(read)
    device = MagicMock()
    device.CUDAGraph().replay = lambda: replayed.append(there() is not None)
    device.Event().elapsed_time = lambda _: 2.0
    monkeypatch.setattr(torch, "cuda", device)
    monkeypatch.setitem(measuring.TURN_MS, "cuda", 5.0)
    turn = measuring.make_timer(partial(torch.neg, read), "cuda", graph=True)
    del read
    gc.collect()
    assert turn() == 2 / 3
    assert replayed == [True] * 4
    with pytest.raises(UsageError, match="only CUDA devices have graphs"):
        measuring.make_timer(lambda: None, graph=True)


def test_bench_writes_tables_plots_and_a_report_and_compares(tmp_path):
    arguments = ["bench", "attention", "--shapes", "smollm2-135m-diff-v2", "--lengths", "16-32", "--repeats", "1"]
    arguments += ["--peer", "FlashDiffAttn_2", "--peer", "DIFF, fused", "-o", str(tmp_path / "a")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "Triton kernels run on CUDA devices, not on cpu" in first.output
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names >= {"bench.json", "bench.md", "bench.csv", "report.html", "attention-time.png"}
    data = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert {cell["workload"].split(", ")[1] for cell in data["cells"]} == {"16 tokens", "32 tokens"}
    again = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "b")])
    assert again.exit_code == 0, again.output
    again = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b" / "bench.json")])
    assert again.exit_code == 0, again.output
    assert "no change beyond noise" in again.output or "x better" in again.output or "x worse" in again.output


@in_one_test(
    ("options", "message"),
    [
        (["speed"], "unknown section 'speed'; choose from attention"),
        (["attention", "--shapes", "7B"], "unknown workload '7B'"),
        (["attention", "--peer", "flush"], "unknown peer 'flush'"),
        (["attention", "--lengths", "4K-1K"], "cannot read '4K-1K'"),
        (["attention", "--device", "cuda"], "torch finds no CUDA device"),
        (["attention", "--device", "tpu"], "unknown device 'tpu'"),
        (["attention", "--graph"], "only CUDA devices have graphs"),
        (["attention", "--dtype", "float8"], "unknown dtype 'float8'"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, options, message):
    ran = CliRunner().invoke(app, ["bench", *options, "-o", str(tmp_path / "out")])
    assert isinstance(ran.exception, UsageError)
    assert message in str(ran.exception)
    assert not (tmp_path / "out").exists()


def test_peers_of_one_section_do_not_stop_another():
    options = BenchOptions(sections=("attention", "decode"), peers=("DIFF, fused", "DIFF, fused, 4-bit cache"))
    assert options.peers_of("attention") == ("DIFF, fused",)
    assert options.peers_of("decode") == ("DIFF, fused, 4-bit cache",)
    with pytest.raises(UsageError, match="unknown peer 'flush'"):
        BenchOptions(sections=("attention", "decode"), peers=("flush",))


def test_a_section_that_fails_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(*arguments):
        raise RuntimeError("no such thing")

    dense = BenchCell("linear", "1 x 1", "dense", values=(1.0,))
    sections = {"quantize": broken, "linear": lambda _: {"dense": lambda _: [dense]}}
    result = run.run_bench(BenchOptions(sections=("quantize", "linear")), sections, tmp_path)
    failed, measured = result.cells
    assert (failed.section, failed.missing) == ("quantize", "RuntimeError: no such thing")
    assert measured.values == (1.0,)
    with pytest.raises(FailedCellsError, match="quantize: RuntimeError"):
        run.require_complete(result)


def test_an_interrupted_bench_goes_on_with_what_it_kept_and_a_whole_one_starts_anew(monkeypatch, tmp_path):
    ran, stop = [], [True]

    def measure(name):
        if name == "second" and stop:
            raise KeyboardInterrupt
        ran.append(name)
        return [BenchCell("linear", name, "dense", values=(1.0, 2.0), facts={"rounding error": 0.5})]

    parts = {name: lambda _, name=name: measure(name) for name in ("first", "second")}
    sections = {"linear": lambda _: parts}
    options = BenchOptions(sections=("linear",))
    with pytest.raises(KeyboardInterrupt, match="run the same command again"):
        run.run_bench(options, sections, tmp_path)
    stop.clear()
    result = run.run_bench(options, sections, tmp_path)
    assert ran == ["first", "second"]
    assert [(cell.workload, cell.values, cell.facts) for cell in result.cells] == [
        (name, (1.0, 2.0), {"rounding error": 0.5}) for name in ("first", "second")
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]
    run.run_bench(options, sections, tmp_path)
    assert ran == ["first", "second"] * 2
