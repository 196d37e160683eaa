import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from scipy.stats import binomtest, ttest_rel

import diffquant
from diffquant.errors import UsageError
from diffquant.measure.comparison import compare_outcomes, make_outcome, read_samples
from diffquant.measure.protocols import hellaswag
from diffquant.measure.results import TaskResult
from diffquant.measure.stats import mean_interval, paired_difference
from diffquant.measure.sweep.compare import compare
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows, model_names
from diffquant.measure.sweep.run import run_sweep
from tests.support import tiny_lm
from tests.support.earlier_results import write_recorded
from tests.support.harness_task import write_task
from tests.support.tables import in_one_test

OPTIONS_OF = {"hellaswag": {"limit": 12}, "perplexity": {"characters": 900, "window": 64, "stride": 32}}
BOTH = {"tasks": tuple(OPTIONS_OF), "task_options": OPTIONS_OF["hellaswag"] | OPTIONS_OF["perplexity"]}
OPTIONS = SweepOptions(bits=(3,), granularities=("row", "tensor"), dtype="float32", **BOTH)
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "run"
    run_sweep([model], OPTIONS, folder).require_complete()
    return folder


def result(run, task, scheme):
    cells = json.loads((run / "sweep.json").read_text())["cells"]
    (found,) = (
        cell["result"]
        for cell in cells
        if cell["task"] == task and f"{cell['bits']}:{cell['granularity']}".strip(":") == scheme
    )
    return found


def test_two_configurations_of_a_sweep_are_compared_by_every_measure(run):
    report = compare(f"{run}@16", f"{run}@3:tensor")
    rows = {row["measure"]: row for row in report.to_dict()["comparisons"]}
    assert list(rows) == ["margin", "acc_norm", "NLL"]
    before, after = (result(run, "hellaswag", scheme) for scheme in ("16", "3:tensor"))
    margin = ttest_rel(after["margins"], before["margins"]).confidence_interval(0.95)
    assert (rows["margin"]["low"], rows["margin"]["high"]) == pytest.approx((margin.low, margin.high))
    assert rows["margin"]["difference"] == pytest.approx(after["margin"] - before["margin"])
    # Of a character it is too small to be read.
    summary = report.summary()
    assert "margin in nats per 100 characters" in summary
    assert f"{100 * before['margin']:.2f}" in summary
    gained = [n for n, (a, b) in enumerate(zip(before["values"], after["values"], strict=True), 1) if b > a]
    lost = [n for n, (a, b) in enumerate(zip(before["values"], after["values"], strict=True), 1) if b < a]
    assert gained + lost
    assert (rows["acc_norm"]["gained"], rows["acc_norm"]["lost"]) == (gained, lost)
    assert rows["acc_norm"]["p"] == pytest.approx(binomtest(len(gained), len(gained + lost), 0.5).pvalue)
    assert rows["acc_norm"]["difference"] == pytest.approx(after["score"] - before["score"])
    text = report.summary()
    for items in (gained, lost):
        assert not items or f"items {', '.join(map(str, items))}" in text


def test_a_text_is_compared_by_window_as_its_tokens_weigh(run):
    report = compare(f"{run}@16", f"{run}@3:tensor")
    (row,) = (row for row in report.to_dict()["comparisons"] if row["measure"] == "NLL")
    before, after = (result(run, "perplexity", scheme) for scheme in ("16", "3:tensor"))
    change = [b - a for a, b in zip(before["nll_by_window"], after["nll_by_window"], strict=True)]
    expected = mean_interval(change, before["tokens_by_window"])
    assert (row["difference"], row["low"], row["high"]) == pytest.approx((expected.mean, expected.low, expected.high))


def test_models_whose_last_folders_are_alike_are_told_apart(tmp_path):
    """And a model is compared with itself, whatever else was swept beside it."""
    models = [tiny_lm.write_diff_v2(tmp_path / name / "c" / "hf", seed=seed) for seed, name in enumerate("AB")]
    options = replace(OPTIONS, tasks=("perplexity",), bits=(16,), task_options=OPTIONS_OF["perplexity"])
    both = run_sweep(models, options, tmp_path / "both")
    run_sweep(models[:1], options, tmp_path / "first")
    assert [row["model"] for row in json_rows(both)] == ["A/c/hf", "B/c/hf"]
    report = compare(tmp_path / "both", tmp_path / "first")
    assert [
        (row["configuration_a"], row["configuration_b"], row["difference"]) for row in report.to_dict()["comparisons"]
    ] == [("A/c/hf 16", "A/c/hf 16", 0.0)]
    assert report.alone == ["A's B/c/hf 16 perplexity"]
    mirrored = compare(tmp_path / "both", tmp_path / "both")
    assert [each.name for each in mirrored.comparisons] == ["A/c/hf 16", "B/c/hf 16"]
    assert compare(f"{tmp_path / 'both'}@A/c/hf", f"{tmp_path / 'both'}@B/c/hf").comparisons[0].difference.mean


@in_one_test(
    ("paths", "names"),
    [
        (["a/x", "b/y"], ["x", "y"]),
        (["a/x", "b/x", "b/y"], ["a/x", "b/x", "y"]),
        (["a/c/x", "b/c/x", "d/x"], ["a/c/x", "b/c/x", "d/x"]),
        (["a/x.gguf", "a/y.gguf"], ["x", "y"]),
        (["a/x.gguf", "a/x"], ["x.gguf", "x"]),
        (["a/x.gguf", "b/x"], ["a/x", "b/x"]),
        (["/x", "/a/x"], None),
        (["/a/x.gguf.gguf", "/a/x.gguf", "/a/x"], None),
    ],
)
def test_a_name_is_as_short_as_it_is_unique(paths, names):
    found = model_names([Path(path) for path in paths])
    assert len({*found.values()}) == len(paths)
    assert names is None or list(found.values()) == names


def test_two_sweeps_are_compared_where_their_configurations_have_one_name(model, run, tmp_path):
    other = tiny_lm.write_diff_v2(tmp_path / "other", seed=3)
    run_sweep([other], replace(OPTIONS, bits=(3, 2), granularities=("row",)), tmp_path / "out")
    report = compare(run, tmp_path / "out" / "sweep.json")
    assert [*dict.fromkeys((each.name, each.task) for each in report.comparisons)] == [
        ("16", "hellaswag"), ("16", "perplexity"), ("logits 3:row", "hellaswag"), ("logits 3:row", "perplexity")
    ]  # fmt: skip
    assert report.alone == [
        *(f"A's logits 3:tensor {task}" for task in OPTIONS.tasks),
        *(f"B's logits 2:row {task}" for task in OPTIONS.tasks),
    ]
    assert "A's logits 3:tensor hellaswag" in report.summary()


def test_recorded_results_are_compared_as_their_table_has_it(tmp_path):
    write_recorded("smollm2-logits-500/sweep.json", tmp_path / "sweep.json")
    report = diffquant.compare(f"{tmp_path}@{SMOLLM2} 16", f"{tmp_path}@{SMOLLM2} 6:tensor")
    (comparison,) = report.comparisons
    assert (len(comparison.gained), len(comparison.lost)) == (7, 10)
    assert comparison.p_value == pytest.approx(binomtest(7, 17, 0.5).pvalue)
    assert [round(100 * x, 1) for x in (comparison.difference.low, comparison.difference.high)] == [-2.3, 1.1]


def test_what_cannot_be_compared_is_said(run, model, tmp_path):
    for source, message in (
        (tmp_path / "absent", "absent: no such file or folder"),
        (tmp_path, "has no sweep.json"),
        (f"{run}@5:row", "no measured configuration has the words '5:row'; choose from model 16, model logits 3:row"),
    ):
        with pytest.raises(UsageError, match=message):
            compare(run, source)
    (tmp_path / "sweep.json").write_text('{"cells": [{}]}')
    with pytest.raises(UsageError, match=r"cannot read .*sweep\.json as a sweep: KeyError"):
        compare(run, tmp_path)
    with pytest.raises(UsageError, match=f"such as '{run}@16' and '{run}@logits "):
        compare(f"{run}@16", f"{run}@logits")
    for task in OPTIONS.tasks:
        run_sweep([model], replace(OPTIONS, tasks=(task,), bits=(16,), task_options=OPTIONS_OF[task]), tmp_path / task)
    with pytest.raises(UsageError, match="A has hellaswag, and B has perplexity"):
        compare(tmp_path / "hellaswag", tmp_path / "perplexity")


@in_one_test(
    ("task", "changed"),
    [("hellaswag", {"limit": 11}), ("perplexity", {"characters": 800}), ("perplexity", {"stride": 64})],
)
def test_other_items_and_texts_are_refused(run, model, tmp_path, task, changed):
    options = replace(OPTIONS, tasks=(task,), bits=(16,), task_options=OPTIONS_OF[task] | changed)
    run_sweep([model], options, tmp_path)
    name, value = next(iter(changed.items()))
    told = f"n: 12 and {value}" if name == "limit" else rf"{name}: \d+ and {value}"
    with pytest.raises(UsageError, match=rf"{task}: A and B have different items \(.*{told}"):
        compare(f"{run}@16", tmp_path)


def test_tasks_that_were_asked_the_same_are_compared_beside_others(run, model, tmp_path):
    options = replace(OPTIONS, bits=(16,), task_options=OPTIONS.task_options | {"limit": 11})
    run_sweep([model], options, tmp_path)
    report = compare(f"{run}@16", tmp_path)
    assert {comparison.task for comparison in report.comparisons} == {"perplexity"}
    (reason,) = report.left_out
    assert reason.startswith("hellaswag: A and B have different items (n: 12 and 11; ")


def test_a_result_without_scores_of_items_is_refused():
    whole = make_outcome("", "lm-eval:wikitext", {}, TaskResult(metric="word_perplexity", score=20.0, n=3))
    with pytest.raises(UsageError, match="no measure in common"):
        compare_outcomes(whole, whole)


class OfTwoProcesses(HFLM):
    """One of two processes of lm-eval. The second one runs first, and leaves what it sends for the first to gather."""

    def of(self, rank, sent):
        self._rank, self._world_size, self._sent = rank, 2, sent
        return self

    def all_gather(self, tensor):
        return torch.stack([tensor, tensor])

    def gather_object(self, obj, dst=0):
        if self.rank == dst:
            return [obj, self._sent.pop(0)]
        return self._sent.append(obj)

    def barrier(self):
        pass


def write_samples(folder, output):
    """The file that lm-eval writes of its own output."""
    tracker = EvaluationTracker(output_path=str(folder))
    tracker.save_results_aggregated(results=dict(output), samples=output["samples"])
    tracker.save_results_samples("quiz", output["samples"]["quiz"])
    (file,) = folder.rglob("samples_*.jsonl")
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Files of two models on one task, as lm-eval itself writes them, and the second's of two processes."""
    folder = tmp_path_factory.mktemp("harness")
    write_task(folder, hellaswag.load_items(limit=15))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    files = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "hf"))
        for seed in (0, 1):
            model = HFLM(pretrained=tiny_lm.llama(seed=seed), tokenizer=tiny_lm.tokenizer())
            output = simple_evaluate(model=model, tasks=["quiz"], task_manager=manager, bootstrap_iters=0)
            files.append((write_samples(folder / str(seed), output), output["results"]["quiz"]))
        model, sent = OfTwoProcesses(pretrained=tiny_lm.llama(seed=1), tokenizer=tiny_lm.tokenizer()), []
        for rank in (1, 0):
            output = simple_evaluate(
                model=model.of(rank, sent), tasks=["quiz"], task_manager=manager, bootstrap_iters=0
            )
        return *files, (write_samples(folder / "two", output), output["results"]["quiz"])


@pytest.fixture(scope="module")
def samples(runs):
    return runs[:2]


def test_samples_that_lm_eval_wrote_are_compared_by_document(samples):
    (first, before), (second, after) = samples
    report = compare(first, second)
    rows = {row["measure"]: row for row in report.to_dict()["comparisons"]}
    assert list(rows) == ["margin", "acc", "acc_norm"]
    assert {row["task"] for row in rows.values()} == {"quiz"}
    for metric in ("acc", "acc_norm"):
        values = [[json.loads(line)[metric] for line in file.read_text().splitlines()] for file in (first, second)]
        assert (rows[metric]["a"], rows[metric]["b"]) == pytest.approx(
            (before[f"{metric},none"], after[f"{metric},none"])
        )
        assert rows[metric]["low"] == pytest.approx(paired_difference(*reversed(values)).low)
        assert rows[metric]["gained"] == [i for i, (a, b) in enumerate(zip(*values, strict=True)) if b > a]


def test_samples_are_paired_by_document_however_many_processes_ran(runs):
    (first, _), (second, alone), (of_two, together) = runs
    by_document = [{s["doc_id"]: s for s in map(json.loads, file.read_text().splitlines())} for file in (first, of_two)]
    assert list(by_document[1]) == [*range(0, 15, 2), *range(1, 15, 2)]
    assert alone["acc,none"] == together["acc,none"]
    report = compare(first, of_two)
    assert report.to_dict()["comparisons"] == compare(first, second).to_dict()["comparisons"]
    assert "prompts" not in report.summary()
    row = next(row for row in report.to_dict()["comparisons"] if row["measure"] == "acc")
    change = {i: by_document[1][i]["acc"] - by_document[0][i]["acc"] for i in range(15)}
    assert (row["gained"], row["lost"]) == ([i for i in change if change[i] > 0], [i for i in change if change[i] < 0])
    flipped = len(row["gained"] + row["lost"])
    assert flipped
    assert row["p"] == pytest.approx(binomtest(len(row["gained"]), flipped).pvalue)


def with_acc(value, lines):
    """Samples of which the fourth has another acc."""
    return [*lines[:3], lines[3] | {"acc": value}, *lines[4:]]


def test_a_measure_that_is_no_finite_number_of_an_item_is_left_out_and_said(samples, tmp_path):
    ((first, _), (second, _)) = samples
    for name, value in (("nan", math.nan), ("infinite", math.inf), ("null", None), ("words", [1, 2])):
        broken = edited(second, tmp_path / name, partial(with_acc, value))
        report = compare(first, broken)
        assert [row["measure"] for row in report.to_dict()["comparisons"]] == ["margin", "acc_norm"]
        assert report.to_dict()["left_out"] == ["B's quiz acc is not finite for item 3"]
        assert "Not compared: B's quiz acc is not finite for item 3." in report.summary()
    lost = {"acc": math.nan, "acc_norm": math.nan, "filtered_resps": [[math.nan, False]] * 4}
    empty = edited(second, tmp_path / "empty", lambda lines: [line | lost for line in lines])
    with pytest.raises(UsageError, match="nothing to compare: B's quiz margin is not finite for item 0, 1, 2, 3"):
        compare(first, empty)


def test_a_metric_that_one_side_lacks_is_said(samples, tmp_path):
    ((first, _), (second, _)) = samples
    less = edited(second, tmp_path / "less", lambda lines: [line | {"metrics": ["acc_norm"]} for line in lines])
    assert compare(first, less).left_out == ["B has no quiz acc"]


def test_results_of_other_numbers_of_items_are_refused():
    few, more = (
        make_outcome("", "lm-eval:x", {}, TaskResult(metric="acc", score=1.0, n=n, values=[1.0] * n)) for n in (3, 4)
    )
    with pytest.raises(UsageError, match="A has scores of 3 items and B of 4, which cannot be compared item by item"):
        compare_outcomes(few, more)


def test_a_margin_of_samples_is_positive_where_lm_eval_calls_the_document_right(samples):
    for file, _ in samples:
        outcome = read_samples(file)
        right = [json.loads(line)["acc_norm"] for line in file.read_text().splitlines()]
        assert [float(margin > 0) for margin in outcome.scores["margin"].values] == right
        assert set(right) == {0.0, 1.0}


def edited(file, folder, edit):
    folder.mkdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    path = folder / file.name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in edit(lines)))
    return path


@in_one_test(
    ("edit", "message"),
    [
        (lambda lines: lines[:-2], r"have different items \(document 13: [0-9a-f]+ and absent; document 14: "),
        (lambda lines: [lines[0] | {"doc_hash": "x"}, *lines[1:]], r"document 0: [0-9a-f]+ and x"),
        (lambda lines: [*lines, lines[3]], "1 lines of .*line 16: document 3 appears twice"),
        (lambda lines: ["{", *lines], "1 lines of .* are not samples of lm-eval: line 1: "),
        (lambda lines: [{"text": "a"}, *lines], "line 1: has no doc_id, doc_hash, target_hash, metrics"),
        (lambda lines: [lines[0] | {"doc_hash": None}], "line 1: doc_hash and target_hash must be texts"),
        (lambda lines: [lines[0] | {"metrics": [{}]}], "line 1: metrics must be a list of names"),
        (lambda lines: [], "is empty"),
        (lambda lines: [*lines, lines[0] | {"filter": "strict"}], "filter strict has other documents"),
    ],
)
def test_samples_that_cannot_be_paired_are_refused(samples, tmp_path, edit, message):
    ((first, _), (second, _)) = samples
    with pytest.raises(UsageError, match=message):
        compare(first, edited(second, tmp_path / "edited", edit))


def test_samples_of_other_tasks_are_refused_and_other_prompts_are_said(samples, tmp_path):
    ((first, _), (second, _)) = samples
    renamed = tmp_path / second.name.replace("quiz", "trivia")
    renamed.write_text(second.read_text())
    with pytest.raises(UsageError, match="A has quiz, and B has trivia"):
        compare(first, renamed)
    assert "prompts" not in compare(first, second).summary()
    chat = edited(second, tmp_path / "chat", lambda lines: [line | {"prompt_hash": "x"} for line in lines])
    assert "The prompts of A and B differ" in compare(first, chat).summary()


def test_every_filter_of_samples_is_a_measure_of_its_own(samples, tmp_path):
    ((first, _), _) = samples
    both = edited(first, tmp_path / "both", lambda lines: [*lines, *(line | {"filter": "strict"} for line in lines)])
    assert {"acc", "acc,strict"} <= set(read_samples(both).scores)
