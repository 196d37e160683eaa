"""The command line, timing in turns, memory, generation's bookkeeping and the GPU table's verdicts."""

import gc
import json
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffquant.bench import memory, run, timing
from diffquant.bench.cells import BenchCell
from diffquant.bench.gpu import tune
from diffquant.bench.options import SECTIONS, BenchOptions
from diffquant.bench.programs import (
    cell_speeds,
    comparison,
    contestants,
    engines,
    generate,
    hellaswag,
    peer_engines,
    products,
    programs,
    sharing,
)
from diffquant.bench.sections import PARTS
from diffquant.cli import app
from diffquant.errors import DiffQuantError, FailedCellsError, MissingDependencyError, UsageError
from diffquant.export.native import kernel_name, library_path, matmul_calls, matmul_kernel_name
from diffquant.kernels.configs import AttentionTile
from diffquant.sweep.grid import SweepOptions
from tests.support import tiny_lm
from tests.support.models import random_llama
from tests.support.thorough import thorough


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 2.0 for name in "ab"}
    assert timing.interleaved(calls, 2) == {"a": [2.0, 2.0], "b": [2.0, 2.0]}
    assert order == ["a", "b", "a", "b"]


def test_a_short_call_runs_often_enough_to_be_timed():
    ran = []
    turn = timing.prepare(lambda: ran.append(1))
    before = len(ran)
    assert turn() > 0
    assert len(ran) - before > 100


def test_graphs_are_for_cuda():
    with pytest.raises(UsageError, match="only CUDA devices have graphs"):
        timing.prepare(lambda: None, graph=True)


def test_a_graph_keeps_what_it_was_captured_of(monkeypatch):
    """It knows addresses alone, and nobody else may keep the tensors there."""
    read, replayed = torch.ones(3), []
    there = weakref.ref(read)
    device = MagicMock()
    device.CUDAGraph().replay = lambda: replayed.append(there() is not None)
    device.Event().elapsed_time = lambda _: 2.0
    monkeypatch.setattr(torch, "cuda", device)
    turn = timing.prepare(partial(torch.neg, read), "cuda", graph=True)
    del read
    gc.collect()
    assert turn() == 2 / 3
    assert replayed == [True] * 4


def test_anonymous_memory_counts_what_was_touched():
    with memory.AnonymousPeak() as watched:
        held = np.ones(40_000_000 // 8)
        time.sleep(0.1)
        del held
    assert watched.peak - watched.before > 20_000_000


def test_bench_writes_tables_plots_and_a_report_and_compares(tmp_path):
    arguments = ["bench", "attention", "--shapes", "smollm2-135m-diff-v2", "--lengths", "16-32", "--repeats", "1"]
    arguments += ["--peer", "FlashDiffAttn_2", "--peer", "DIFF, fused", "-o", str(tmp_path / "a")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "Triton kernels run on CUDA devices, not on cpu" in first.output
    names = {file.name for file in (tmp_path / "a").iterdir()}
    assert names >= {"bench.json", "bench.md", "bench.csv", "report.html", "attention-time.png"}
    data = json.loads((tmp_path / "a" / "bench.json").read_text())
    assert data["machine"]["copy"]["bytes a second"] > 0
    assert {cell["workload"].split(", ")[1] for cell in data["cells"]} == {"16 tokens", "32 tokens"}
    again = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "b"), "--compare", str(tmp_path / "a/bench.json")])
    assert again.exit_code == 0, again.output
    assert "moved beyond noise" in again.output or "x better" in again.output or "x worse" in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["speed"], "unknown section 'speed'; known are attention"),
        (["attention", "--shapes", "7B"], "unknown workload '7B'"),
        (["attention", "--peer", "flush"], "unknown peer 'flush'"),
        (["attention", "--lengths", "4K-1K"], "cannot read '4K-1K'"),
        (["attention", "--device", "cuda"], "torch finds no CUDA device"),
        (["attention", "--device", "tpu"], "unknown device 'tpu'"),
        (["attention", "--graph"], "only CUDA devices have graphs"),
        (["attention", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["generate", "--checkpoint", "nowhere"], "no such checkpoint: nowhere"),
        (["attention", "--compare", "nowhere.json"], "cannot read nowhere.json"),
        (["--tune", "configs.json"], "tries kernels on a CUDA device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
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
    assert set(SECTIONS) >= {"attention", "decode", "generate", "quantize", "export", "sweep"}


def test_a_section_that_fails_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(PARTS, "quantize", broken)
    dense = BenchCell("linear", "1 x 1", "dense", values=(1.0,))
    monkeypatch.setitem(PARTS, "linear", lambda _: {"dense": lambda _: [dense]})
    monkeypatch.setattr(run.roofline, "measure_roofline", lambda *arguments: {})
    result = run.run_bench(BenchOptions(sections=("quantize", "linear")), tmp_path)
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
    monkeypatch.setitem(PARTS, "linear", lambda _: parts)
    monkeypatch.setattr(run.roofline, "measure_roofline", lambda *arguments: ran.append("roofline") or {"copy": {}})
    options = BenchOptions(sections=("linear",))
    with pytest.raises(KeyboardInterrupt, match="run the same command again"):
        run.run_bench(options, tmp_path)
    stop.clear()
    result = run.run_bench(options, tmp_path)
    assert ran == ["roofline", "first", "second"]
    assert [(cell.workload, cell.values, cell.facts) for cell in result.cells] == [
        (name, (1.0, 2.0), {"rounding error": 0.5}) for name in ("first", "second")
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]
    run.run_bench(options, tmp_path)
    assert ran == ["roofline", "first", "second"] * 2


def test_a_bench_does_not_go_on_with_what_was_measured_of_another_model_of_that_name(monkeypatch, tmp_path):
    def measure(path):
        if path.parent.name == "a":
            raise KeyboardInterrupt
        return [BenchCell("generate", str(path), "dense", values=(1.0,))]

    def parts(options):
        (path,) = options.checkpoints
        quick = [BenchCell("generate", f"{path} at once", "dense", values=(2.0,))]
        return {"first": lambda _: quick, "second": lambda _: measure(path)}

    monkeypatch.setitem(PARTS, "generate", parts)
    monkeypatch.setattr(run.roofline, "measure_roofline", lambda *arguments: {"copy": {}})
    options = {}
    for name in "ab":
        (tmp_path / name / "model").mkdir(parents=True)
        options[name] = BenchOptions(sections=("generate",), checkpoints=(tmp_path / name / "model",))
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(options["a"], tmp_path / "out")
    told = [cell.workload for cell in run.run_bench(options["b"], tmp_path / "out").cells]
    assert told == [f"{tmp_path / 'b' / 'model'} at once", str(tmp_path / "b" / "model")]


def test_a_model_that_transformers_does_not_know_has_no_hflm_beside_it(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    (cell,) = programs.scoring([model], items=2, repeats=1)
    assert "which transformers does not know" in cell.missing


@thorough
def test_a_shared_sweep_is_measured_beside_one_that_is_not(tmp_path, monkeypatch):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    grid = SweepOptions(bits=(16, 8), task_options={"limit": 2}, dtype="float32")
    one, two = sharing.share_sweep(model, (1, 2), 2, grid)
    assert (one.path, two.path, two.baseline, two.unit) == ("1 worker", "2 workers", "1 worker", "cells/min")
    assert one.workload == two.workload == "model, 2 cells"
    assert len(one.values) == len(two.values) == 2
    assert not two.falls

    options = BenchOptions(sections=("sweep",), checkpoints=(model,), workers=(1, 2))
    assert list(PARTS["sweep"](options)) == ["checkpoints", "kinds of cells", "workers"]
    assert list(PARTS["sweep"](replace(options, workers=()))) == [
        "checkpoints",
        "kinds of cells",
    ]
    with pytest.raises(UsageError, match="workers take counts of at least 1"):
        replace(options, workers=(0, 1))

    monkeypatch.setattr(sharing, "run_sweep", other_answers(sharing.run_sweep))
    with pytest.raises(DiffQuantError, match="with 2 workers 2 of 2 items turned out otherwise"):
        sharing.share_sweep(model, (1, 2), 1, grid)


def test_each_kind_of_cell_has_a_speed_beside_16_bits(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    cells = cell_speeds.cell_speeds(model, ["float32"], items=2, repeats=2)
    assert [cell.path for cell in cells] == list(cell_speeds.KINDS)
    assert {cell.baseline for cell in cells} == {"16 bits"}
    assert len({cell.workload for cell in cells}) == 1
    assert all(len(cell.values) == 2 and min(cell.values) > 0 and not cell.falls for cell in cells)


def other_answers(run_sweep):
    """The sweep, in which every item turns out otherwise where two workers share it."""

    def shifted(models, options, folder, engine):
        result = run_sweep(models, options, folder, engine=partial(engine, workers=1))
        if engine.keywords["workers"] == 1:
            return result
        cells = [
            replace(
                c, measurement=replace(c.measurement, result=replace(c.result, values=[1 - v for v in c.result.values]))
            )
            for c in result.cells
        ]
        return replace(result, cells=cells)

    return shifted


def test_shares_are_of_the_float32_export_and_of_torch():
    torch = {"decode": [10.0, 20.0, 30.0], "prefill": [100.0], "peak_bytes": 1000, "tokens": [1, 2, 3]}
    low = {"decode": [80.0], "prefill": [50.0], "peak_bytes": 250, "folder_bytes": 20, "tokens": [1, 2, 4]}
    found = {contestants.TORCH: torch, contestants.FLOAT: {"folder_bytes": 100, "peak_bytes": 500}, "low": low}
    comparison.compare_with_torch(low, torch)
    comparison.compare_with_export(found, contestants.FLOAT)
    assert low["decode_of_torch"] == 4.0
    assert low["prefill_of_torch"] == 0.5
    assert low["same_tokens"] == 2
    assert (low["folder_of_export"], low["peak_of_export"]) == (0.2, 0.5)
    assert low["torch"] == {what: torch[what] for what in ("decode", "prefill", "peak_bytes")}


def test_a_merged_file_keeps_the_torch_that_each_ratio_is_to(tmp_path, monkeypatch):
    speeds = iter((10.0, 40.0, 20.0, 60.0))

    def measured(model, place, names, settings):
        rows = {name: {"decode": [next(speeds)], "prefill": [1.0], "peak_bytes": 1, "tokens": [1]} for name in names}
        for row in rows.values():
            comparison.compare_with_torch(row, rows[contestants.TORCH])
        return rows

    monkeypatch.setattr(generate, "measure_generation", measured)
    file, low = tmp_path / "generate.json", "export 4:g32 kv 8 embed 8"
    for contestant in (contestants.FLOAT, low):
        generate.main([tmp_path], contestants=contestant, merge=True, file=file)
    rows = json.loads(file.read_text())["models"][tmp_path.name]
    assert list(rows) == [contestants.TORCH, contestants.FLOAT, low]
    assert [row["decode_of_torch"] for row in rows.values()] == [1.0, 4.0, 3.0]
    for row in rows.values():
        assert row["decode_of_torch"] == row["decode"][0] / row["torch"]["decode"][0]
        assert row["settings"].keys() >= {"commit", "date", "cpu", "threads"}


def test_batches_have_their_own_medians_and_shares():
    torch, low = (
        {"decode": [10.0], "prefill": [10.0], "peak_bytes": 1, "tokens": [1]}
        | {"batches": {"4": {"decode": [speed, 3 * speed, 2 * speed], "prefill": [speed]}}}
        for speed in (5.0, 20.0)
    )
    comparison.compare_with_torch(low, torch)
    assert low["batches"]["4"]["decode_median"] == 40.0
    assert low["batches"]["4"]["decode_of_torch"] == low["batches"]["4"]["prefill_of_torch"] == 4.0
    assert low["torch"]["batches"] == torch["batches"]
    told = comparison.table("m", {"low": low})
    assert "low, 4 at once: decode 40.0 tokens/s, prefill 20.0" in told


@pytest.mark.parametrize("name", ["export", "torch"])
def test_a_sequence_in_a_batch_is_continued_as_it_is_alone(tmp_path, name):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    if name == "export":
        engines.write_export({"weights": "8:row"}, model, tmp_path / "out")
        engine = engines.open_export(tmp_path / "out", 1)
    else:
        engine = engines.open_torch(model, 1)
    prompts = np.random.default_rng(0).integers(3, 90, (3, 7))
    first = engine.decode(prompts[:1], 6)[1]
    assert len(first) == 6
    assert engine.takes_batches
    assert engine.decode(prompts, 6)[1] == first
    assert engine.decode(prompts[[2, 0, 1]], 6)[1] == engine.decode(prompts[2:], 6)[1]


def test_tokens_of_all_sequences_are_counted(monkeypatch):
    times = iter((10.0, 11.0, 12.0, 20.0, 24.0))
    monkeypatch.setattr(engines, "_clock", [lambda: next(times)])
    logits = np.zeros((4, 1, 9))
    engine = engines.stepping(lambda batch, rows: lambda ids: logits[:batch], lambda: "none")
    assert engine.decode(np.zeros((4, 5), int), 3)[0] == 4 * 2 / (12.0 - 10.0)
    assert engine.prefill(np.zeros((4, 5), int)) == 4 * 5 / (24.0 - 20.0)


def test_llama_batched_bench_is_asked_for_sequences_at_once(tmp_path, monkeypatch):
    fake_llama_bench(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not peer_engines.open_llama_bench(tmp_path, 2).takes_batches
    program = tmp_path / "llama-batched-bench"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nflags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "assert int(flags['-c']) == int(flags['-npl']) * (int(flags['-npp']) + int(flags['-ntg']))\n"
        "print('loading')\n"
        "print(json.dumps({'speed_pp': float(flags['-npp']), 'speed_tg': float(flags['-npl'] + flags['-t'])}))\n"
    )
    program.chmod(0o755)
    engine = peer_engines.open_llama_bench(tmp_path, 2)
    assert engine.takes_batches
    assert engine.decode(np.zeros((16, 64), int), 32) == (162.0, [])
    assert engine.prefill(np.zeros((4, 65), int)) == 65.0


def fake_llama_bench(folder):
    """A program that answers as llama-bench does, with the flags it was given as its speed's digits."""
    program = folder / "llama-bench"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nflags = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "print(json.dumps([{'avg_ts': float(flags['-p']) + float(flags['-n']) + float(flags.get('-d', 0)) / 1000}]))\n"
    )
    program.chmod(0o755)


def test_llama_bench_is_asked_for_the_same_lengths_and_its_memory_is_not_ours(tmp_path, monkeypatch):
    fake_llama_bench(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = peer_engines.open_llama_bench(tmp_path, 2)
    assert engine.decode(np.zeros((1, 64), int), 32) == (32.064, [])
    assert engine.prefill(np.zeros((1, 128), int)) == 128.0
    assert "-t 2" in engine.about["flags"]
    assert engine.kernels() == "llama.cpp's"
    monkeypatch.setattr(contestants, "_engines", [engine])
    assert contestants.peak_bytes() is None
    row = {"decode": [1.0], "prefill": [1.0], "peak_bytes": None, "tokens": []}
    comparison.compare_with_torch(row, {"decode": [1.0], "prefill": [1.0], "peak_bytes": 5, "tokens": [7]})
    assert "same_tokens" not in row
    assert "peak_of_torch" not in row
    assert "-" in comparison.table("m", {"llama-bench Q4_0": row})


def test_cpu_seconds_of_llama_bench_leave_out_its_loading(tmp_path, monkeypatch):
    # What it computes is what more tokens, or more turns, take: a thousandth of a second a token after a second.
    program = tmp_path / "llama-bench"
    program.write_text(
        f"#!{sys.executable}\nimport sys, time, json\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "tokens = int(given['-p']) * int(given['-r']) + int(given['-n'])\n"
        "start = time.process_time()\n"
        "while time.process_time() < start + 0.2 + tokens / 1000: pass\n"
        "print(json.dumps([{'avg_ts': 1.0}]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engines, "_clock", [engines.time.process_time])
    engine = peer_engines.open_llama_bench(tmp_path, 1)
    assert engine.decode(np.zeros((1, 64), int), 200)[0] == pytest.approx(1000, rel=0.2)
    assert engine.prefill(np.zeros((1, 100), int)) == pytest.approx(1000, rel=0.2)


def test_cpu_seconds_take_one_thread(tmp_path):
    with pytest.raises(UsageError, match="give"):
        generate.main([tmp_path], threads=2, cpu_seconds=True)


def test_llama_bench_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="llama-bench is not on the path"):
        peer_engines.open_llama_bench(tmp_path, 1)


@thorough
def test_genais_int4_model_is_built_and_continues_tokens(tmp_path):
    pytest.importorskip("onnxruntime_genai")
    model = tmp_path / "llama"
    # Its attention takes widths of 16 and multiples.
    widths = {"head_dim": 16, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": tiny_lm.WORDS}
    random_llama(0, **widths, num_attention_heads=4, num_key_value_heads=2).save_pretrained(model)
    tiny_lm.tokenizer().save_pretrained(model)
    peer_engines.write_genai(model, tmp_path / "genai")
    engine = peer_engines.open_genai(tmp_path / "genai", 1)
    speed, tokens = engine.decode(engines.random_tokens(model, 5), 6)
    assert speed > 0
    assert len(tokens) == 6
    assert engine.prefill(engines.random_tokens(model, 8)) > 0
    prompts = engines.random_tokens(model, 15).reshape(3, 5)
    assert engine.decode(prompts, 6)[1] == engine.decode(prompts[:1], 6)[1]


def test_a_peer_that_cannot_write_is_a_reason_and_its_folder_is_not_tried_again(tmp_path):
    found = contestants.write_all(tmp_path / "no-gguf", tmp_path, ["llama.cpp Q4_0"])
    assert "missing" in found["llama.cpp Q4_0"]
    assert contestants.write_all(tmp_path / "no-gguf", tmp_path, ["llama.cpp Q4_0"]) == found


def test_rows_of_native_kernels_are_refused_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFQUANT_NATIVE_LIBRARY", "")
    names = [contestants.TORCH, contestants.FLOAT, "function body, 4:g32 kv 8"]
    with pytest.raises(UsageError, match=r"^'export float32' run the native library, and there is none"):
        generate.measure_generation(tmp_path, tmp_path, names, generate.Settings(threads=1))
    generate.check_kernels([contestants.TORCH, "function body, 4:g32 kv 8", "onnxruntime-genai int4"])


needs_library = pytest.mark.skipif(library_path() is None, reason="the native library is not built")


@needs_library
@pytest.mark.parametrize("native", [True, False])
def test_a_row_names_the_kernels_that_ran_and_not_those_that_could_have(tmp_path, native):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    engines.write_export({"weights": "4:row"}, model, tmp_path / "out")
    code = f"""
from pathlib import Path
from diffquant.bench.programs.engines import open_export
import numpy as np
engine = open_export(Path({str(tmp_path / "out")!r}), 1, native={native})
print(engine.kernels())
engine.decode(np.array([[3, 4, 5]]), 3)
print(engine.kernels())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = ran.stdout.splitlines()
    assert before == "ONNX Runtime's"
    names = [f"attention {kernel_name()}", *([f"products {matmul_kernel_name()}"] if matmul_kernel_name() else [])]
    assert after == (f"diffquant's: {', '.join(names)}" if native else "ONNX Runtime's")


def test_products_are_timed_in_turns_and_the_library_computes_its_own(monkeypatch):
    if (name := matmul_kernel_name()) is None:
        pytest.skip("no library, or ONNX Runtime's own products are used here")
    monkeypatch.setitem(products.SHAPES, "tiny", (96, 40))
    monkeypatch.setattr(products, "_COLD_BYTES", 20_000)
    product = products.Product("tiny", 3, 4, 32)
    calls = matmul_calls()
    times = products.measure(product, [name], 1, 2)
    assert product.matrices == 11
    assert matmul_calls() == calls + 2 * 2 * 11
    assert list(times) == [products.STOCK, name]
    assert [len(turns) for turns in times.values()] == [2, 2]
    assert products.ratios({products.STOCK: [3.0, 9.0, 4.0], name: [2.0, 1.0, 5.0]}) == {
        "ratio": {name: 2.0},
        "ratio_of_best": {name: 3.0},
    }


def test_errors_lose_their_paths():
    assert contestants.reason(OSError("no file /a/b/c.gguf. More")) == "OSError: no file c.gguf"


def test_every_kernel_with_configurations_is_tuned():
    pytest.importorskip("triton")
    kernels = {"prefill_v1", "prefill_v2", "prefill_int8", "simulated", "decode", "gemv", "gemm"}
    assert {key.split("/")[0] for key in tune.shipped()} == kernels


def test_tuning_takes_the_fastest_neighbour_that_is_right(monkeypatch):
    times = {"keys": {128: 1.0, 32: 3.0}, "stages": {3: 0.5}}
    current = {}

    def milliseconds(work):
        entry = current["entry"]
        if entry.get("warps") == 16:
            raise RuntimeError("out of resources")
        return 2.0 / np.prod([2.0 / times.get(name, {}).get(value, 2.0) for name, value in entry.items()])

    def trying(entries):
        current["entry"] = {k: v for k, v in next(iter(entries.values())).items() if v != getattr(shipped, k)}
        return memory_of()

    class memory_of:
        def __enter__(self):
            return self

        def __exit__(self, *raised):
            current["entry"] = {}

    shipped = AttentionTile(128, 64, 8, 2)
    current["entry"] = {}
    monkeypatch.setattr(tune, "_milliseconds", milliseconds)
    monkeypatch.setattr(tune, "trying", trying)
    before, now, changed = tune.improve("k/sm_90/128", shipped, lambda: None, lambda: True)
    assert (before, changed) == (2.0, {"keys": 128, "stages": 3})
    assert now == pytest.approx(0.25 * 1.0)
    assert tune.improve("k/sm_90/128", shipped, lambda: None, lambda: False)[2] == {}


@thorough
@needs_library
def test_generation_gives_the_same_tokens_in_torch_and_in_the_float32_export(tmp_path):
    pytest.importorskip("onnxruntime")
    model = tiny_lm.write_diff_v2(tmp_path / "diff-v2")
    settings = generate.Settings(threads=1, repeats=1, prompt=5, new=4, prefill=8, batches=(3,))
    names = [contestants.TORCH, contestants.FLOAT, "llama.cpp Q4_0"]
    found = generate.measure_generation(model, tmp_path, names, settings)
    assert found[contestants.FLOAT]["same_tokens"] == 4
    assert found[contestants.TORCH]["kernels"].startswith("torch's, ")
    assert found[contestants.FLOAT]["kernels"] == f"diffquant's: attention {kernel_name()}"
    assert found[contestants.FLOAT]["folder_bytes"] > 0
    for row in (found[contestants.TORCH], found[contestants.FLOAT]):
        assert all(row["batches"]["3"][what][0] > 0 for what in ("decode", "prefill"))
    assert found[contestants.FLOAT]["write_seconds"] > 0
    assert "missing" in found["llama.cpp Q4_0"]
    comparison.compare_with_export(found, contestants.FLOAT)
    assert "llama.cpp Q4_0: none, " in comparison.table("diff-v2", found)
    cells = [cell for name, row in found.items() for cell in programs._of_generation("diff-v2", name, row)]
    assert {cell.path for cell in cells if cell.missing} == {"llama.cpp Q4_0"}
    assert all(cell.unit == "tokens/s" for cell in cells)


def test_scorers_are_compared_by_the_medians_of_their_turns():
    def scorer(name, dtype, batch, *seconds):
        turns = {"seconds": seconds, "cpu_seconds": seconds}
        return {"name": name, "dtype": dtype, "batch_size": batch, "choices": [1]} | turns

    timings = [scorer("diffquant", dtype, None, 1.0, 2.0, 30.0) for dtype in ("float32", "bfloat16")]
    timings += [scorer("HFLM", dtype, n, 4.0, 8.0, 9.0) for dtype in ("float32", "bfloat16") for n in (1, 8)]
    found = {"items": 4, "default_dtype": {"diffquant": "bfloat16", "HFLM": "float32"}, "timings": timings}
    assert set(hellaswag.ratios(found).values()) == {(4.0, 4.0)}
    text = hellaswag.scorer_summary(found)
    assert "each one's defaults, bfloat16 against float32: 4.00 times" in text
    assert ["diffquant", "float32", "2.00", "0.500"] in [line.split() for line in text.splitlines()]
