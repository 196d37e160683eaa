"""Generation's bookkeeping, and the sections that run whole programs."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from diffquant.benchmarks import peers, run
from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.benchmarks.report import markdown
from diffquant.benchmarks.run import BenchOptions
from diffquant.benchmarks.workloads import Model
from diffquant.checkpoints.source import open_source
from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.onnx.native import attention_instruction_set, library_path
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from research.bench import peaks, sections
from research.bench.programs import (
    cell_speeds,
    cold_start,
    comparison,
    contestants,
    engines,
    generate,
    opening,
    peer_engines,
    products,
    programs,
    serving,
    sharing,
)
from research.bench.programs.batches import BatchSettings
from research.bench.programs.quantize_index import plan_once
from research.bench.programs.quantize_peers import in_turns, packed_weights
from research.bench.throughput import TRANSFORMER, V1, V2, run_throughput
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint, write_diffllama
from tests.support.models import random_llama
from tests.support.native_kernels import count_matmul_calls, matmul_instruction_set
from tests.support.synthetic import preset, write_holes
from tests.support.thorough import sampled, thorough


def test_a_bench_does_not_go_on_with_what_was_measured_of_another_model_of_that_name(monkeypatch, tmp_path):
    def scored(models, *_):
        ran.append(models[0])
        return [BenchCell("sweep", str(models[0]), "dense", values=(1.0,))]

    def timed(model, *_):
        if model.parent.name == "a":
            raise KeyboardInterrupt
        return []

    ran = []
    monkeypatch.setattr(sections.programs, "scoring", scored)
    monkeypatch.setattr(sections, "cell_speeds", timed)
    options, known = BenchOptions(sections=("sweep",)), {}
    for name in "ab":
        (tmp_path / name / "model").mkdir(parents=True)
        known[name] = sections.program_sections([tmp_path / name / "model"])
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(options, known["a"], tmp_path / "out")
    cells = run.run_bench(options, known["b"], tmp_path / "out").cells
    assert ran == [tmp_path / name / "model" for name in "ab"]
    assert [cell.workload for cell in cells] == [str(tmp_path / "b" / "model")]


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
    assert not two.smaller_is_better

    options = BenchOptions(sections=("sweep",))
    names = [f"{part}, {model}" for part in ("checkpoints", "kinds of cells", "workers")]
    assert list(sections.program_sections([model], (1, 2))["sweep"](options)) == names
    assert list(sections.program_sections([model])["sweep"](options)) == names[:2]
    with pytest.raises(UsageError, match="workers takes counts of at least 1"):
        sections.program_sections([model], (0, 1))
    with pytest.raises(UsageError, match="no such checkpoint: nowhere"):
        sections.program_sections([Path("nowhere")])

    monkeypatch.setattr(sharing, "run_sweep", other_answers(sharing.run_sweep))
    with pytest.raises(DiffQuantError, match="with 2 workers 2 of 2 items turned out otherwise"):
        sharing.share_sweep(model, (1, 2), 1, grid)


def test_each_kind_of_cell_has_a_speed_beside_16_bits(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    cells = cell_speeds.cell_speeds(model, ["float32"], items=2, repeats=2)
    assert [cell.path for cell in cells] == list(cell_speeds.KINDS)
    assert {cell.baseline for cell in cells} == {"16 bits"}
    assert len({cell.workload for cell in cells}) == 1
    assert all(len(cell.values) == 2 and min(cell.values) > 0 and not cell.smaller_is_better for cell in cells)


def other_answers(run_sweep):
    """The sweep, in which every item turns out otherwise where two workers share it."""

    def shifted(models, options, folder, engine):
        result = run_sweep(models, options, folder, engine=partial(engine, workers=1))
        if engine.keywords["workers"] == 1:
            return result
        cells = [
            replace(cell, result=replace(cell.result, values=[1 - value for value in cell.result.values]))
            for cell in result.cells
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
from research.bench.programs.engines import open_export
import numpy as np
engine = open_export(Path({str(tmp_path / "out")!r}), 1, native={native})
print(engine.kernels())
engine.decode(np.array([[3, 4, 5]]), 3)
print(engine.kernels())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = ran.stdout.splitlines()
    assert before == "ONNX Runtime's"
    names = [
        f"attention {attention_instruction_set()}",
        *([f"products {matmul_instruction_set()}"] if matmul_instruction_set() else []),
    ]
    assert after == (f"diffquant's: {', '.join(names)}" if native else "ONNX Runtime's")


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
    assert found[contestants.FLOAT]["kernels"] == f"diffquant's: attention {attention_instruction_set()}"
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


ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
# torch itself may take others of its own along, such as filelock and jinja2.
NOT_ON_GPU_MACHINES = {
    *("transformers", "safetensors", "gguf", "accelerate", "yaml", "typer", "matplotlib", "tqdm"),
    *("onnx", "onnxruntime", "onnxscript", "lm_eval", "compressed_tensors", "bitsandbytes", "scipy", "pytest"),
}
PROGRAMS = [f"research.bench.programs.{name}" for name in ("generate", "hellaswag", "native_op", "quantize", "serving")]
PROGRAMS += [
    f"research.bench.programs.{name}" for name in ("products", "quantize_index", "quantize_peers", "roundings")
]
PROGRAMS += ["tests.support.synthetic", "research.bench.__main__"]


def test_the_gpu_table_needs_torch_triton_and_numpy_alone():
    pytest.importorskip("triton")
    code = """
from diffquant.benchmarks import contest, decode, linears, peers, workloads
from research.bench.gpu import groups, ratios, tune
print(len(groups.groups()), len(tune.active_configs()) > 0, *contest.SECTIONS)
"""
    command = [sys.executable, "-c", WITHOUT.format(packages=NOT_ON_GPU_MACHINES) + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["True", "attention", "decode"]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_says_what_it_does_and_what_its_options_are(module):
    if module.endswith(("products", "native_op")):
        pytest.importorskip("onnxruntime")
    program = typer.Typer()
    program.command()(import_module(module).main)
    command = typer.main.get_command(program)
    assert command.help.endswith(".")
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    assert CliRunner().invoke(program, ["--no-such-option"]).exit_code == 2


@thorough
def test_the_bench_runs_without_onnx_and_says_what_it_leaves_out():
    code = """
import importlib.util, sys
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name in ("onnx", "onnxruntime") else there(name, *of)
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
from diffquant.benchmarks.run import BenchOptions
from diffquant.support.progress import report_nothing
from research.bench.sections import program_sections
print(program_sections(())["export"](BenchOptions(("export",)))["ONNX"](report_nothing)[0].missing)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ONNX models need onnx, onnxruntime: pip install")


def test_throughput_compares_models_of_nearly_equal_size():
    model = Model("v1", 128, 1, 2, 2, 64, 128, 192, 211)
    cells = run_throughput([model], [16], 1, "float32", "cpu", 1)
    sizes = [cell.facts["parameters"] for cell in cells]
    assert [cell.path for cell in cells] == [TRANSFORMER, V1, V2]
    # V1 adds λ alone; V2's queries are doubled.
    assert sizes[1] - sizes[0] == 4 * model.width
    assert sizes[2] > sizes[0]


def test_each_rounding_is_timed_and_one_that_fails_is_an_error_and_no_row(tmp_path):
    source, numbers = write_checkpoint(tmp_path / "source", "unilm-v2"), tmp_path / "numbers.json"
    command = [sys.executable, "-m", "research.bench.programs.roundings", str(source), "--roundings", "nearest,mse,mde"]
    done = subprocess.run([*command, "--weights", "4:row", "--json", str(numbers)], check=False)
    assert done.returncode == 1
    result = json.loads(numbers.read_text())
    assert list(result["roundings"]) == ["nearest", "mse"]
    assert all(run["process_seconds"] > run["seconds"] > 0 for run in result["roundings"].values())


def test_products_are_timed_in_turns_and_the_library_computes_its_own(monkeypatch):
    if (name := matmul_instruction_set()) is None:
        pytest.skip("no library, or ONNX Runtime's own products are used here")
    monkeypatch.setitem(products.SHAPES, "tiny", (96, 40))
    monkeypatch.setattr(products, "_COLD_BYTES", 20_000)
    product = products.Product("tiny", 3, 4, 32)
    calls = count_matmul_calls()
    times = products.measure(product, [name], 1, 2)
    assert product.matrices == 11
    assert count_matmul_calls() == calls + 2 * 2 * 11
    assert list(times) == [products.STOCK, name]
    assert [len(turns) for turns in times.values()] == [2, 2]
    assert products.ratios({products.STOCK: [3.0, 9.0, 4.0], name: [2.0, 1.0, 5.0]}) == {
        "ratio": {name: 2.0},
        "ratio_of_best": {name: 3.0},
    }


RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_a_gguf_file_is_read_in_a_fifth_of_transformers_time():
    result = json.loads((RESULTS / "opening.json").read_text())
    assert result["ratio"] >= 5
    assert f"{result['ratio']:.1f} times as long" in opening.opening_summary(result)


def test_inspect_starts_within_a_third_more_than_torch_takes():
    result = json.loads((RESULTS / "inspect-motif-2-12.7b.json").read_text())
    assert max(result["ratio"], result["cpu_ratio"]) <= 1.3
    assert f"takes {result['ratio']:.2f} times as long" in cold_start.cold_start_summary(result)


def turn(seconds, cpu_seconds):
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def test_ratios_are_medians_of_turns_that_followed_one_another():
    turns = {
        "import torch": [turn(1.0, 1.0), turn(4.0, 1.0), turn(1.0, 1.0)],
        "diffquant inspect": [turn(1.5, 2.0), turn(4.0, 2.0), turn(1.2, 2.0)],
    }
    assert cold_start._ratio(turns, "seconds") == pytest.approx(1.2)
    assert cold_start._ratio(turns, "cpu_seconds") == pytest.approx(2.0)


def result(*cells):
    environment = {"date": "2026-01-01", "device": "a CPU", "cores": 2, "versions": {"torch": "2"}}
    return BenchResult(environment, {"threads": 2}, cells)


def test_memory_is_measured_again_for_the_paths_that_are_known_and_the_result_says_so(tmp_path):
    workload = "smollm2-135m-diff-v2, 1024 tokens, batch 1, float32"
    cells = (
        BenchCell("attention", workload, peers.BASELINE, values=(1.0,), peak_bytes=0, length=1024),
        BenchCell("attention", workload, "a path of old", values=(1.0,), peak_bytes=7, length=1024),
        BenchCell("linear", "1 -> 1, 1 tokens, float32", "dense", values=(1.0,), peak_bytes=7),
    )
    before = replace(result(*cells), settings={"threads": 1, "device": "cpu"})
    now = peaks.measure_peaks(before)
    # The output at least, 9 pairs' two heads of 64 floats, as exactly as Linux counts pages.
    assert now.cells[0].peak_bytes >= 4 * 1024 * 9 * 2 * 64 - (1 << 18)
    assert [each.peak_bytes for each in now.cells[1:]] == [None, 7]
    assert f"torch {torch.__version__}" in markdown(now)
    with pytest.raises(UsageError, match="of cuda; its memory is measured with its times"):
        peaks.measure_peaks(replace(before, settings={"device": "cuda"}))


def test_the_peer_is_given_every_weight_that_quantize_packs(tmp_path):
    source = open_source(write_diffllama(tmp_path / "source"))
    weights = packed_weights(source)
    packed = {error.name for error in quantize(source, tmp_path / "out", "4:g32").errors}
    assert len(weights) == len(packed) > 0
    expected = [source.checkpoint.read(name) for name in packed]
    assert all(any(torch.equal(weight, other) for other in expected) for weight in weights)


def test_ways_take_turns_and_the_first_one_does_not_count():
    order = []
    times = in_turns({name: lambda name=name: order.append(name) for name in "ab"}, turns=3)
    assert order == list("abababab")
    assert [len(each["seconds"]) for each in times.values()] == [3, 3]


def test_the_whole_index_takes_no_disk_and_its_plan_little_memory(tmp_path):
    write_holes(tmp_path / "index", preset("motif-3"), 155)
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "index").iterdir()) < 10e6
    run = plan_once(tmp_path / "index", "4:g128")
    assert (run["tensors"], run["parameters"]) == (2236, 314_841_775_750)
    assert run["bytes_before"] == 2 * run["parameters"]
    # Five matrices of each attention, three of each dense network, five of each layer with experts.
    assert run["packed"] == 53 * 5 + 2 * 3 + 51 * 5
    assert run["peak_anonymous"] < 1e9
    source = open_source(tmp_path / "index")
    assert run["bytes_after"] == plan_quantization(source, Recipe.of(weights="4:g128")).bytes_after
    config = json.loads((tmp_path / "index" / "config.json").read_text())
    assert config["num_hidden_layers"] == 53


SETTINGS = BatchSettings("float32", 1, requests=(1, 3), prompt=9, new=4, repeats=2)
SMALL = {"num_hidden_layers": 1, "intermediate_size": 96}


@pytest.mark.parametrize("model", sampled(["DIFF V1", "DIFF V2", serving.TRANSFORMER], 3))
def test_every_engine_continues_the_same_prompts_by_the_same_tokens(tmp_path, model):
    """In float32; ONNX Runtime's kernel for 4 bits rounds activations."""
    folders = {key: folder for key, folder in serving.write_models(tmp_path, **SMALL).items() if key[0] == model}
    measured = [row for row in serving.measure_batches(folders, SETTINGS) if "values" in row]
    assert {row["engine"] for row in measured} >= set(serving.ENGINES) - {serving.SERVED}
    assert all(row["equal"] == 1 for row in measured if (row["engine"], row["bits"]) != (serving.ONNX, "4"))
    assert all(len(row["values"]) == SETTINGS.repeats for row in measured)


def test_an_engine_that_is_not_there_is_a_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such engine. Nor any other")

    monkeypatch.setitem(serving.ENGINES, serving.SERVED, refuse)
    folders = serving.write_models(tmp_path, ("16",), **SMALL)
    found = serving.measure_batches(folders, SETTINGS, [serving.SERVED, serving.ONNX])
    cells = serving.cells(found, SETTINGS)
    missing = {cell.missing for cell in cells if serving.SERVED in cell.path}
    assert missing == {"RuntimeError: no such engine"}
    assert all(cell.values for cell in cells if serving.ONNX in cell.path)


def test_caches_of_the_models_are_of_one_size_and_query_heads_as_many(tmp_path):
    from diffquant.model.adapters import adapter_for
    from diffquant.quantization.modeling_diffquant import PlainHeads

    sizes = set()
    for config in serving.MODELS.values():
        spec = adapter_for(config).architecture.diff_spec
        heads = PlainHeads(spec.to_dict() | {"kv_repeats": 1})
        sizes.add((spec.layout.query_heads, heads.kv_pairs * heads.cuts * heads.width))
    assert sizes == {(8, 256)}


def test_aims_are_medians_of_ratios_turn_by_turn():
    def row(model, engine, requests, *values):
        return {"model": model, "bits": "4", "engine": engine, "requests": requests, "values": list(values)}

    found = serving.aims(
        [
            row("DIFF V2", serving.SERVED, 1, 10, 10, 10),
            row("DIFF V2", serving.SERVED, 32, 20, 40, 60),
            row("DIFF V2", serving.GENERATE, 32, 10, 10, 60),
            row(serving.TRANSFORMER, serving.SERVED, 32, 40, 40, 40),
        ]
    )
    assert [(aim["what"], aim["measured"], aim["met"]) for aim in found] == [
        ("DIFF V2, 4 bits, 32 requests: served / diffquant generate", 2, True),
        ("DIFF V2, 4 bits: served, 32 requests / 1", 4, True),
        ("4 bits, 32 requests: served, DIFF V2 / Transformer", 1, True),
    ]
