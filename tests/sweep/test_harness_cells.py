import json

from diffquant.sweep import SweepOptions, run_sweep
from diffquant.sweep.table import json_rows, text_table
from tests.support import tiny_lm

TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: endings
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def test_a_harness_task_is_compared_with_16_bits_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    questions = [{"query": f"Number {i} is", "endings": ["even", "odd", "large"], "label": i % 2} for i in range(8)]
    (tmp_path / "quiz.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "quiz.yaml").write_text(TASK.format(data=tmp_path / "quiz.jsonl"))
    model = tiny_lm.write_llama(tmp_path / "model")
    task = f"lm-eval:{tmp_path / 'quiz.yaml'}"
    options = SweepOptions(tasks=(task,), bits=(2,), dtype="float32")
    result = run_sweep([model], options, tmp_path / "out")
    result.require_complete()
    full, low = json_rows(result)
    assert full[f"{task} metric"] == "acc"
    assert full[f"{task} n"] == 8
    assert full[f"{task} score"] + low[f"{task} difference"] == low[f"{task} score"]
    assert low[f"{task} difference_low"] < low[f"{task} difference_high"]
    assert f"{task} acc" in text_table(result)
