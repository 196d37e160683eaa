"""A multiple-choice task of lm-eval over items that are at hand."""

import json
from collections.abc import Iterable
from pathlib import Path

from diffquant.measure.protocols.hellaswag import HellaSwagItem
from diffquant.measure.task import BATCH_TOKENS
from diffquant.measure.tasks.lm_eval import Harness

NAME = "quiz"
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: endings
doc_to_target: label
metric_list: [{metrics}]
"""


def write_task(folder: Path, items: Iterable[HellaSwagItem], metrics: Iterable[str] = ("acc", "acc_norm")) -> Path:
    """Write the file of a task named `NAME`, and its documents beside it; returns the file."""
    entries = [{"query": item.query, "endings": list(item.endings), "label": item.label} for item in items]
    data, task = folder / f"{NAME}.jsonl", folder / f"{NAME}.yaml"
    data.write_text("\n".join(map(json.dumps, entries)))
    listed = ", ".join(f"{{metric: {metric}}}" for metric in metrics)
    task.write_text(_TASK.format(name=NAME, data=data, metrics=listed))
    return task


def harness(task: str, limit: int | None = None) -> Harness:
    """A task of lm-eval, by its name or YAML file."""
    return Harness(task=task, limit=limit, batch_tokens=BATCH_TOKENS)
