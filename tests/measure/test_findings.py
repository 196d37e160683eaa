"""What a sweep's headline says where items are too few, and what its page says of models of one name."""

from io import BytesIO
from pathlib import Path

import pytest

from diffquant.measure.cells import Cell
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.grid import SweepOptions, list_points
from diffquant.measure.sweep.outputs import summarize_findings, sweep_report
from diffquant.measure.sweep.plot import list_panel_rows, plot
from diffquant.measure.sweep.result import SweepResult, notes
from diffquant.reports.page import render_page
from tests.support.tables import in_one_test

MODEL = Path("a model")
SETTINGS = {"date": "", "options": {}, "tasks": [], "models": {}, "quantized": [], "versions": {}, "dtype": "float32"}
KL = {16: None, 8: 1e-4, 4: 0.03, 3: 0.2}
MEGABYTES = {16: 16, 8: 8, 4: 4, 3: 3}


def swept(task, result):
    options = SweepOptions(tasks=(task,), bits=(8, 4, 3), targets=("weights",), granularities=("row", "tensor"))
    cells = []
    for point in list_points([MODEL], options):
        stored = {"weights": 1_000_000 * MEGABYTES[point.bits], "kv_per_token": 1000.0}
        measured = TaskResult.from_dict(result(point) | {"seconds": 1.0, "stored": stored})
        cells.append(Cell(point, task, measured, None))
    return SweepResult(cells, SETTINGS)


def text(point):
    kl = KL[point.bits]
    windows = [] if kl is None else [kl] * 8
    by_window = {"kl_by_window": windows, "tokens_by_window": [10] * len(windows)} if windows else {}
    return {"metric": "perplexity", "perplexity": 20.0, "bits_per_byte": 1.0, "kl": kl, **by_window}


def items(point, n):
    right = [int(i % 2 == 0) for i in range(n)]
    # As many become right as become wrong.
    values = right if point.bits == 16 else [1 - right[0], 1 - right[1], *right[2:]]
    kl = {} if point.bits == 16 else {"kl_by_item": [0.3, 0.4] * (n // 2), "tokens_by_item": [10] * n}
    return {"metric": "acc_norm", "score": sum(values) / n, "n": n, "values": values, "choices": values, **kl}


def one_item(point):
    change = {16: 0.0, 8: 0.0, 4: 0.1, 3: 0.2}[point.bits]
    kl = {} if point.bits == 16 else {"kl_by_item": [0.3 + change], "tokens_by_item": [10]}
    score = {"metric": "acc_norm", "score": 1.0, "n": 1, "values": [1], "choices": [0]}
    return score | {"margins": [0.5 - change]} | kl


def one_window(point):
    kl = KL[point.bits]
    by_window = {} if kl is None else {"kl_by_window": [kl], "tokens_by_window": [10]}
    return {"metric": "perplexity", "perplexity": 20.0, "bits_per_byte": 1.0, "kl": kl, **by_window}


@pytest.mark.parametrize(
    ("task", "result"), [("hellaswag", one_item), ("perplexity", one_window)], ids=["item", "window"]
)
def test_one_item_or_window_alone_is_drawn_without_bars(task, result):
    sweep = swept(task, result)
    drawn = [
        value
        for band in list_panel_rows(sweep)
        for lines in band.lines.values()
        for line in lines
        for value in line.points
    ]
    assert drawn
    plot(sweep, BytesIO())
    assert render_page(sweep_report(sweep, "run", []))


def test_models_of_one_name_are_told_apart_below_the_table_and_in_the_settings():
    folders = [Path("trained/model"), Path("packed/model")]
    options = SweepOptions(tasks=("perplexity",), bits=(4,), targets=("weights",))
    stored = {"seconds": 1.0, "stored": {"weights": 1000, "kv_per_token": 1000.0}}
    cells = [
        Cell(point, "perplexity", TaskResult.from_dict(text(point) | stored), None)
        for point in list_points(folders, options)
    ]
    told = {"models": {str(folder): folder.parent.name * 8 for folder in folders}, "quantized": [str(folders[1])]}
    sweep = SweepResult(cells, SETTINGS | told)
    assert any("before this sweep: packed/model." in note for note in notes(sweep))
    facts = render_page(sweep_report(sweep, "run", []))
    for folder in folders:
        assert f"SHA-256 of {folder}" in facts
        assert told["models"][str(folder)] in facts


@in_one_test(
    ("n", "starts"), [(20, "hellaswag: 20 items cannot show a loss below 18"), (2000, "hellaswag: no measurable")]
)
def test_items_that_are_too_few_are_said_to_be(n, starts):
    (sentence,) = summarize_findings(swept("hellaswag", lambda point: items(point, n)))
    assert sentence.startswith(starts)
    assert ("6 of 6 configurations" in sentence) == (n == 20)
    assert "KL 0.35 [" in sentence


def test_one_item_alone_is_said_to_tell_nothing():
    assert summarize_findings(swept("hellaswag", one_item)) == ["hellaswag: one item cannot show a loss."]
