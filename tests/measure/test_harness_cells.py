from diffquant.measure.protocols.hellaswag import HellaSwagItem
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from tests.support import tiny_lm
from tests.support.harness_task import write_task


def test_a_harness_task_is_compared_with_16_bits_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    items = [HellaSwagItem(f"Number {i} is", ("even", "odd", "large"), i % 2) for i in range(8)]
    model = tiny_lm.write_llama(tmp_path / "model")
    task = f"lm-eval:{write_task(tmp_path, items, ['acc'])}"
    options = SweepOptions(tasks=(task,), bits=(2,), dtype="float32", task_options={"trust_task": True})
    result = run_sweep([model], options, tmp_path / "out")
    result.require_complete()
    full, low = json_rows(result)
    assert full[f"{task} metric"] == "acc"
    assert full[f"{task} n"] == 8
    assert full[f"{task} score"] + low[f"{task} difference"] == low[f"{task} score"]
    assert low[f"{task} difference_low"] < low[f"{task} difference_high"]
    assert f"{task} acc" in result.table()
