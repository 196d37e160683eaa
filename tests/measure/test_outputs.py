import csv
import io
import re
from dataclasses import astuple, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diffquant.measure.cells import Cell
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.stats import Difference, mean_interval, paired_difference, wilson_interval
from diffquant.measure.sweep import plot as sweep_plot
from diffquant.measure.sweep.grid import SweepOptions, list_points
from diffquant.measure.sweep.outputs import summarize_findings, sweep_report, write_outputs
from diffquant.measure.sweep.plot import list_panel_rows
from diffquant.measure.sweep.result import SweepResult, csv_table, json_rows, read_sweep
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks import task_class_named
from diffquant.reports.page import render_page
from tests.support import tiny_lm
from tests.support.tables import in_one_test

MODELS = [Path("transformer"), Path("diff")]
TASKS = ("hellaswag", "perplexity")
OPTIONS = SweepOptions(TASKS, bits=(8, 4, 3), targets=("logits",), granularities=("row", "tensor"))


def measured(point, task):
    """Item i is right while i is below 6 at 16 bits, and 8 or 4 bits each lose one more."""
    stored = {"seconds": 1.0, "stored": {"weights": 5_000_000, "kv_per_token": 1234.0}}
    if task == "perplexity":
        text = {"metric": "perplexity", "perplexity": 20.0, "bits_per_byte": 1.0, "kl": None, **stored}
        return Cell(point, task, TaskResult.from_dict(text), None)
    if point.bits == 3 and point.granularity == "tensor":
        return Cell(point, task, None, "the <model> computes NaN")
    right = {16: 6, 8: 5, 4: 4, 3: 3}[point.bits]
    values = [int(i < right) for i in range(10)]
    layers = [{"layer": 0, "calls": 2, "entries": 100, "clipped": 7, "step_mean": 0.25, "step_max": 0.5}]
    extra = {} if point.is_baseline else {"logit_report": layers}
    cell = {"metric": "acc_norm", "score": right / 10, "n": 10, "values": values, "choices": values}
    return Cell(point, task, TaskResult.from_dict({**cell, **extra, **stored}), None)


@pytest.fixture
def sweep():
    cells = [measured(point, task) for point in list_points(MODELS, OPTIONS) for task in OPTIONS.tasks]
    settings = {"date": "2026-01-01 00:00 UTC", "options": {"bits": [8, 4, 3]}, "quantized": [], "dtype": "float32"}
    settings |= {"tasks": [{"name": "hellaswag", "n": 10}], "models": {"transformer": "ab" * 32}}
    settings |= {"versions": {"torch": "2"}}
    return SweepResult(cells, settings)


def report_html(sweep):
    return render_page(sweep_report(sweep, "run", ["sweep.json", "table.csv"]))


def test_a_sweep_is_read_back_as_it_was_written(sweep, tmp_path):
    (tmp_path / "sweep.json").write_text(sweep.to_json())
    again = read_sweep(tmp_path / "sweep.json")
    assert again.to_json() == sweep.to_json()
    assert again.table() == sweep.table()


def test_changes_that_were_not_committed_are_said(sweep):
    assert "uncommitted" not in sweep.table()
    cell = next(cell for cell in sweep.cells if cell.result)
    changed = replace(cell, result=replace(cell.result, commit="0123+changes"))
    cells = [changed if each is cell else each for each in sweep.cells]
    note = f"1 of {len(cells)} cells were measured by code with uncommitted changes."
    assert note in replace(sweep, cells=cells).table()
    assert note in report_html(replace(sweep, cells=cells))


def test_the_first_row_of_a_model_is_16_bits_and_the_others_compare_with_it(sweep):
    table = sweep.table().splitlines()
    assert table[0].split("  ")[0] == "model"
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(6, 10))
    assert re.match(rf"transformer +- +16 +60\.0 \[{low}, {high}\] +- ", table[2])
    assert re.match(r"transformer +logits +8:row +50\.0 \[23\.7, 76\.3\] +-10\.0 \[-.*\] +\+0 -1 +20 ", table[3])
    assert "10 items, zero-shot" in table[-4]


def test_csv_and_json_hold_the_same_numbers_in_full(sweep):
    records = json_rows(sweep)
    read = list(csv.DictReader(io.StringIO(csv_table(sweep))))
    assert [{k: "" if v is None else str(v) for k, v in record.items()} for record in records] == read
    assert records[2]["hellaswag lost"] == 2
    assert records[2]["hellaswag recovery"] == pytest.approx(4 / 6)
    assert records[2]["hellaswag recovery_low"] == pytest.approx(1 + records[2]["hellaswag difference_low"] / 0.6)


def test_an_interval_of_one_item_has_no_ends_in_csv_and_json():
    points_of_two = list_points(MODELS[:1], SweepOptions(tasks=("hellaswag",), bits=(4,)))
    stored = {"seconds": 1.0, "stored": {"weights": 5, "kv_per_token": 1.0}}
    cells = [
        Cell(point, "hellaswag", TaskResult.from_dict(scored | stored), None)
        for point, score in zip(points_of_two, (0.5, 0.25), strict=True)
        for scored in [{"metric": "acc_norm", "score": score, "n": 1, "values": [score]}]
    ]
    record = json_rows(SweepResult(cells, {}))[1]
    assert record["hellaswag difference"] == -0.25
    ends = (f"hellaswag {name}_{end}" for name in ("difference", "recovery") for end in ("low", "high"))
    assert {record[end] for end in ends} == {None}


PER_ROW, PER_TENSOR = "attention logits, per row", "attention logits, per tensor"


def test_a_line_runs_from_wide_to_narrow_and_leaves_out_what_failed(sweep):
    change, score = list_panel_rows(sweep)
    assert (change.is_change, score.is_change) == (True, False)
    drawn = {(title, line.model): line for title, lines in score.lines.items() for line in lines}
    assert set(drawn) == {(title, model) for title in (PER_ROW, PER_TENSOR) for model in ("transformer", "diff")}
    assert [(point.x, round(point.y)) for point in drawn[PER_ROW, "diff"].points] == [(8, 50), (4, 40), (3, 30)]
    assert [point.x for point in drawn[PER_TENSOR, "diff"].points] == [8, 4]
    assert drawn[PER_ROW, "diff"].full.y == pytest.approx(60)


def test_of_one_model_granularities_are_lines_of_one_panel(sweep):
    alone = replace(sweep, cells=[cell for cell in sweep.cells if cell.point.model == MODELS[1]])
    change, score = list_panel_rows(alone)
    for band in (change, score):
        assert {title: [line.model for line in lines] for title, lines in band.lines.items()} == {
            "attention logits": ["per row", "per tensor"]
        }
    by_line = {line.model: [point.x for point in line.points] for line in score.lines["attention logits"]}
    assert by_line == {"per row": [8, 4, 3], "per tensor": [8, 4]}
    # The dashed line of 16 bits, which both share, is drawn once.
    assert [line.full and round(line.full.y) for line in score.lines["attention logits"]] == [60, None]
    assert "attention logits" in report_html(alone)


def test_panels_that_all_show_the_same_are_one(sweep):
    baseline = {cell.point.model: cell.result for cell in sweep.cells if cell.point.is_baseline}
    same = replace(sweep, cells=[replace(cell, result=baseline[cell.point.model]) for cell in sweep.cells])
    for band in list_panel_rows(same):
        (lines,) = band.lines.values()
        drawn = {line.model: [point.x for point in line.points] for line in lines}
        assert drawn == {"transformer": [8, 4, 3], "diff": [8, 4, 3]}
    assert "every target (equal results)" in report_html(same)


def test_bars_are_the_paired_interval_of_the_difference_from_16_bits(sweep):
    eight, *_ = list_panel_rows(sweep)[0].lines[PER_ROW][0].points
    change = paired_difference([int(i < 5) for i in range(10)], [int(i < 6) for i in range(10)])
    assert eight[1:4] == pytest.approx((-10, 100 * change.low, 100 * change.high))


def test_the_bar_of_a_share_is_wilsons_interval():
    right = TaskResult(metric="acc", score=1.0, n=5, values=[1.0] * 5)
    share = astuple(ITEMS.metrics[0].estimate(right, right))
    assert share == pytest.approx((100, 100 * wilson_interval(5, 5)[0], 100))
    assert ITEMS.metrics[0].text(right, None) == "100.0 [56.6, 100.0]"


def test_a_text_is_drawn_as_kl_with_its_interval_over_windows_and_not_at_16_bits():
    text = task_class_named("perplexity").columns
    kl = TaskResult(metric="perplexity", details={"kl": 0.3, "kl_by_window": [0.2, 0.5], "tokens_by_window": [64, 32]})
    interval = mean_interval([0.2, 0.5], [64, 32])
    (change,) = text.change_metrics
    assert change.estimate(kl, None) == Difference(0.3, interval.low, interval.high)
    earlier = TaskResult(metric="perplexity", details={"kl": 0.3})
    assert change.estimate(earlier, None) == Difference(0.3, 0.3, 0.3)
    assert change.estimate(TaskResult(metric="perplexity", details={"kl": None}), None) is None


def test_the_headline_names_the_largest_loss_and_the_width_from_which_none_is_measurable(sweep):
    failed, sentence = summarize_findings(sweep)
    assert failed == "2 of 28 cells failed."
    said = r"hellaswag: 10 items cannot show a loss below \d\d points; use more items, or KL\."
    assert re.fullmatch(said, sentence)
    lost = [
        replace(cell, result=replace(cell.result, values=[0] * 10)) if cell.result and cell.point.bits == 3 else cell
        for cell in sweep.cells
    ]
    assert (
        "2 of 10 configurations lose; the largest loss is that of transformer at logits 3:row"
        in summarize_findings(replace(sweep, cells=lost))[1]
    )
    assert summarize_findings(replace(sweep, cells=lost))[1].endswith("From 4 bits up no loss is measurable.")


class References(HTMLParser):
    """Collects what a browser would load."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [v for name, v in attributes if name in ("src", "href", "xlink:href", "data", "action", "srcset")]


def test_the_report_loads_nothing(sweep):
    text = report_html(sweep)
    reader = References()
    reader.feed(text)
    assert set(filter(lambda reference: not reference.startswith("#"), reader.found)) == {"./sweep.json", "./table.csv"}
    assert not {"link", "iframe", "img"} & set(reader.tags)
    assert reader.tags.count("script") == 1
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert {"table", "svg", "details"} <= set(reader.tags)


def test_the_report_shows_failures_escaped_clipping_and_settings(sweep):
    text = report_html(sweep)
    assert "2 of 28 cells failed" in text
    assert "the &lt;model&gt; computes NaN" in text
    assert "clipped 7.00%" in text
    assert "ab" * 32 in text


@in_one_test("name", ["$\\frac$", "$$", "$x$", "a$b"])
def test_a_name_is_drawn_letter_by_letter(sweep, tmp_path, name):
    renamed = {Path("transformer"): Path(name), Path("diff"): Path("diff")}
    cells = [replace(cell, point=replace(cell.point, model=renamed[cell.point.model])) for cell in sweep.cells]
    figure = sweep_plot._figure(list_panel_rows(SweepResult(cells, sweep.settings)))
    figure.savefig(tmp_path / "plot.svg")
    (legend,) = figure.legends
    drawn = [text._preprocess_math(text.get_text()) for text in legend.get_texts()]
    assert (name, False) in drawn


def test_a_sweep_of_16_bits_alone_has_a_table_and_no_plot(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    result = run_sweep([model], SweepOptions(bits=(16,), task_options={"limit": 2}, dtype="float32"), tmp_path / "out")
    (tmp_path / "out" / "plot.png").write_bytes(b"of the sweep before")
    write_outputs(result, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.png"))
    assert (tmp_path / "out" / "report.html").exists()
