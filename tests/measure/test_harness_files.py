"""A task of lm-eval is known by every file of this machine that lm-eval opens for it, as Python's audit events tell."""

import json
import os
import sys
import threading
from pathlib import Path

import datasets
import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from diffquant.errors import UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks import lm_eval as lm_eval_task
from diffquant.measure.tasks import make_tasks
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.harness_task import harness


def reading(data):
    """A task of these `dataset_kwargs`."""
    return f"{PLAIN}dataset_kwargs: {data}\n"


REST = """
output_type: multiple_choice
doc_to_text: "Q: {{q}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
"""
PLAIN = "task: quiz\ntest_split: test\ndataset_path: json\n" + REST
HELPER = """
from pathlib import Path

def documents():
    return Path(__file__).with_name("documents.json").read_text()
"""
CUSTOM = """
import json

def made(**arguments):
    import datasets
    from words.helper import documents
    return {"test": datasets.Dataset.from_list(json.loads(documents()))}
"""
PACKAGE = {"words/__init__.py": "", "words/helper.py": HELPER, "words/documents.json": ""}
# Files of each way to read something, and of those the ones that make no difference.
FORMS = {
    "text": (
        {"quiz.yaml": reading("{data_files: d.json}").replace("test_split: test", "test_split: train"), "d.json": ""},
        (),
    ),
    "by split": ({"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": "", "o.json": ""}, ("o.json",)),
    "list": ({"quiz.yaml": reading("{data_files: {test: [d.json, e.json]}}"), "d.json": "", "e.json": ""}, ()),
    "glob": (
        {"quiz.yaml": reading("{data_files: {test: 'in/**/*.json'}}")}
        | dict.fromkeys(("in/d.json", "in/x/e.json", "d.json"), ""),
        ("d.json",),
    ),
    "data_dir": ({"quiz.yaml": reading("{data_dir: in}"), "in/test.json": "", "d.json": ""}, ("d.json",)),
    "below data_dir": (
        {"quiz.yaml": reading("{data_dir: in, data_files: {test: d.json}}"), "in/d.json": ""},
        (),
    ),
    "folder": ({"quiz.yaml": PLAIN.replace("json\n", "./in\n", 1), "in/test.json": ""}, ()),
    "include": (
        {
            "quiz.yaml": "include: parts/a.yaml\ntask: quiz\n",
            "parts/a.yaml": "include: b.yaml\ntest_split: test\ndataset_path: json\n" + REST,
            "parts/b.yaml": "dataset_kwargs: {data_files: {test: d.json}}\n",
            "d.json": "",
            "parts/c.yaml": "task: other\n",
        },
        ("parts/c.yaml",),
    ),
    "function": (
        {
            "quiz.yaml": reading("{data_files: {test: d.json}}") + "process_docs: !function tools.shown\n",
            "tools.py": "import words.helper\n\ndef shown(docs):\n    words.helper.documents()\n    return docs\n",
            **PACKAGE,
            "d.json": "",
            "unused.txt": "",
        },
        ("unused.txt",),
    ),
    "custom data": ({"quiz.yaml": PLAIN + "custom_dataset: !function tools.made\n", "tools.py": CUSTOM, **PACKAGE}, ()),
    "group": (
        {
            "quiz.yaml": "group: quiz\ntask: [one, {task: two, dataset_kwargs: {data_files: {test: f.json}}}]\n",
            "one.yaml": PLAIN.replace("quiz", "one") + "dataset_kwargs: {data_files: {test: d.json}}\n",
            "two.yaml": PLAIN.replace("quiz", "two"),
            **dict.fromkeys(("d.json", "f.json"), ""),
        },
        (),
    ),
}
DOCUMENTS = [{"q": f"{number}?", "choices": ["yes", "no"], "label": number % 2} for number in range(4)]

_opened: set[str] = set()
_watches = threading.Event()


def _note(event, arguments):
    if event == "open" and _watches.is_set() and isinstance(arguments[0], str | os.PathLike):
        _opened.add(os.path.abspath(arguments[0]))


sys.addaudithook(_note)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or (json.dumps(DOCUMENTS) if name.endswith(".json") else "\n"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "task").mkdir()
    monkeypatch.chdir(tmp_path / "task")
    # As if the command were run by `python -m`, so that the task's modules find each other.
    monkeypatch.syspath_prepend(str(tmp_path / "task"))
    yield tmp_path / "task"
    for name in [name for name in sys.modules if name.partition(".")[0] == "words"]:
        del sys.modules[name]


def opened_by_lm_eval(folder):
    """The files below a folder that lm-eval opens to make the documents of its task "quiz"."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    _opened.clear()
    _watches.set()
    try:
        for task in manager.load(["quiz"])["tasks"].values():
            list(task.doc_iterator())
    finally:
        _watches.clear()
    below = {Path(name) for name in _opened if Path(name).is_relative_to(folder) and "__pycache__" not in name}
    return {path for path in below if path.is_file()}


@pytest.mark.parametrize("form", FORMS)
def test_a_task_is_known_by_every_file_that_lm_eval_opens_for_it(place, form):
    files, others = FORMS[form]
    write(place, files)
    opened = opened_by_lm_eval(place)
    assert {place / name for name in files if name not in others and not name.endswith("__init__.py")} <= opened
    before = harness("quiz.yaml").identity()
    for path in opened:
        content = path.read_bytes()
        path.write_bytes(content + b" \n")
        assert harness("quiz.yaml").identity() != before, path
        path.write_bytes(content)
    for name in others:
        (place / name).write_text((place / name).read_text() + " \n")
    assert harness("quiz.yaml").identity() == before


def test_a_task_without_files_of_its_own_keeps_its_address(place):
    """Cells that people have are of such tasks: the identity is lm-eval's version and the file's digest, as ever."""
    text = PLAIN.replace("json\n", "allenai/arc\n", 1)
    write(place, {"quiz.yaml": text})
    (task,) = make_tasks(["lm-eval:quiz.yaml"], {"trust_task": True}, 4096)
    identity = task.identity()
    assert identity.pop("lm_eval")
    digest = "8cb989c6ececb741"
    assert identity == {"name": "lm-eval:quiz.yaml", "limit": None, "batch_tokens": 4096, "yaml": digest}


def test_a_folder_by_the_name_of_a_reader_is_in_nobodys_way(place):
    write(place, {"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": "", "json/other.txt": ""})
    assert place / "d.json" in opened_by_lm_eval(place)
    before = harness("quiz.yaml").identity()
    (place / "d.json").write_text("[]")
    assert harness("quiz.yaml").identity() != before


def test_a_file_of_prompts_is_read(place):
    """lm-eval 0.4.13 opens it, and cannot use it for tasks of several choices."""
    write(
        place, {"quiz.yaml": reading("{data_files: {test: d.json}}") + "use_prompt: 'asked.yaml:short'", "d.json": ""}
    )
    write(place, {"asked.yaml": "prompts: {short: {doc_to_text: 'Q {{q}}', doc_to_target: '{{label}}'}}\n"})
    assert set(harness("quiz.yaml").identity()["files"]) == {"asked.yaml", "d.json"}


def test_data_that_nobody_here_can_see_is_said(place):
    write(place, {"quiz.yaml": PLAIN.replace("json\n", "allenai/arc\n", 1)})
    assert harness("quiz.yaml").untracked_inputs() == ["the dataset allenai/arc on the hub"]
    write(place, {"quiz.yaml": reading("{data_files: {test: 'https://x.example/d.json'}}")})
    assert harness("quiz.yaml").untracked_inputs() == ["https://x.example/d.json"]
    write(place, {"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": ""})
    assert harness("quiz.yaml").untracked_inputs() == []
    assert harness("arc_easy").untracked_inputs() == ["the data that lm-eval fetches for it"]


def test_a_file_that_cannot_be_read_is_named_before_the_first_item(place):
    write(place, {"quiz.yaml": "include: part.yaml\ntask: quiz\n"})
    (place / "part.yaml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="refers to a file that cannot be read"):
        harness("quiz.yaml").identity()


def test_a_sweep_measures_again_when_a_tasks_data_change(place):
    write(place, {"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": ""})
    model = tiny_lm.write_llama(place.parent / "model")
    options = SweepOptions(("lm-eval:quiz.yaml",), bits=(16,), dtype="float32", task_options={"trust_task": True})
    score = lambda: run_sweep([model], options, place.parent / "out").cells[0].result.score  # noqa: E731
    first = score()
    assert score() == first
    (place / "d.json").write_text(json.dumps([each | {"label": 1 - each["label"]} for each in DOCUMENTS]))
    assert score() == pytest.approx(1 - first)
    assert len(list((place.parent / "out/cells").glob("*.json"))) == 2
    assert "the data that lm-eval fetches" not in run_sweep([model], options, place.parent / "out").table()


def test_the_file_that_is_named_is_the_task_that_runs(place):
    """lm-eval takes the first file of the folder that has the task's name."""
    write(place, {"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": ""})
    write(place, {"older.yaml": reading("{data_files: {test: e.json}}"), "e.json": ""})
    with pytest.raises(UsageError, match=r"finds no task in .*quiz\.yaml"):
        harness("quiz.yaml").run(None, None, report_nothing)


FILTERED = (
    PLAIN.replace("multiple_choice", "generate_until")
    .replace("doc_to_choice: choices\n", "")
    .replace("metric: acc", "metric: exact_match")
    + """
generation_kwargs: {until: ["\\n"], max_gen_toks: 2}
dataset_kwargs: {data_files: {test: d.json}}
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "(zzz)"}, {function: take_first}]}
  - {name: loose, filter: [{function: map, mapping_dict: {}, default_value: "0"}, {function: take_first}]}
"""
)


def test_a_task_with_several_filters_is_scored_by_its_first(place):
    """Every filter has each document once more: together they are another score, of twice as many items."""
    write(place, {"quiz.yaml": FILTERED, "d.json": ""})
    model = TorchModel(load(tiny_lm.write_llama(place.parent / "model")), tiny_lm.tokenizer())
    result = harness("quiz.yaml").run(model, None, report_nothing)
    assert result.n == len(result.values) == len(DOCUMENTS)
    assert result.details["metrics"]["quiz/exact_match,strict"] == result.score == 0
    assert result.details["metrics"]["quiz/exact_match,loose"] == 0.5


def test_a_group_of_tasks_runs_from_its_file(place):
    write(place, FORMS["group"][0])
    model = TorchModel(load(tiny_lm.write_llama(place.parent / "model")), tiny_lm.tokenizer())
    result = harness("quiz.yaml").run(model, None, report_nothing)
    assert result.n == 2 * len(DOCUMENTS)


SHELL = "{{ cycler.__init__.__globals__.os.popen('touch RAN').read() }}"


@pytest.mark.parametrize("task", ["quiz.yaml", "folder/quiz.yaml", "outer.yaml"])
def test_a_file_that_is_not_lm_evals_runs_nothing_until_it_is_trusted(place, task, caplog):
    """lm-eval's templates are no sandbox: with trust, the command runs."""
    text = reading(f"{{data_files: {{test: {place}/d.json}}}}").replace("{{q}}", SHELL + "{{q}}")
    assert SHELL in text
    write(place, {"quiz.yaml": text, "folder/quiz.yaml": text, "d.json": ""})
    write(place, {"outer.yaml": "include: folder/quiz.yaml\n"})
    with pytest.raises(UsageError, match=r"as code, which can do anything .* give trust_task=True"):
        make_tasks([f"lm-eval:{task}"], {}, 4096)
    assert not (place / "RAN").exists()
    (trusted,) = make_tasks([f"lm-eval:{task}"], {"trust_task": True}, 4096)
    assert f"lm-eval runs the templates and functions of {task}" in caplog.text
    if task == "folder/quiz.yaml":
        trusted.run(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), None, lambda *_: None)
        assert (place / "RAN").exists()


def test_lm_evals_own_file_needs_no_trust():
    file = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    (task,) = make_tasks([f"lm-eval:{file}"], {}, 4096)
    assert task.task == str(file)


@pytest.mark.parametrize("name", ["quiz.txt", "./quiz.txt", "no_such_task"])
def test_lm_eval_is_given_no_path_that_nobody_checked(place, name, monkeypatch):
    monkeypatch.setattr(lm_eval_task, "_all_tasks", lambda: TaskManager(include_defaults=False))
    write(place, {"quiz.txt": PLAIN})
    with pytest.raises(UsageError, match=r"has no task .* path of a \.yaml"):
        harness(name).run(None, None, report_nothing)


def test_a_pipe_among_the_files_that_lm_eval_opens_is_refused(place):
    write(place, {"quiz.yaml": reading("{data_files: {test: d.json}}"), "d.json": ""})
    os.mkfifo(place / "other.yaml")
    with pytest.raises(OSError, match="named pipe"):
        harness("quiz.yaml").run(None, None, report_nothing)
