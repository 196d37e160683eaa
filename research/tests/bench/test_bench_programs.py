"""Generation's bookkeeping, and the sections that run whole programs."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from diffquant.benchmarks import run
from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.run import BenchOptions
from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.onnx.native import attention_instruction_set, library_path, matmul_instruction_set
from research.bench import sections
from research.bench.programs import (
    cell_speeds,
    comparison,
    contestants,
    engines,
    generate,
    peer_engines,
    programs,
    sharing,
)
from tests.support import tiny_lm
from tests.support.models import random_llama
from tests.support.thorough import thorough


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
