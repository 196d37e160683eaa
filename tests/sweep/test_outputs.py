import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diffquant.evals.columns import Compared, ItemColumns
from diffquant.evals.stats import mean_interval, paired_difference
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import kind_of
from diffquant.sweep import SweepOptions, SweepResult, run_sweep, write_outputs
from diffquant.sweep import plot as sweep_plot
from diffquant.sweep.grid import points
from diffquant.sweep.measurement import Measurement
from diffquant.sweep.plot import panels
from diffquant.sweep.report import report_html
from diffquant.sweep.result import MeasuredCell
from diffquant.sweep.table import csv_table, json_rows, text_table
from studies.results import read_sweep
from tests.support import tiny_lm

MODELS = [Path("transformer"), Path("diff")]
OPTIONS = SweepOptions(
    tasks=("hellaswag", "perplexity"), bits=(8, 4, 3), targets=("logits",), granularities=("row", "tensor")
)


def measured(point, task):
    """Item i is right while i is below 6 at 16 bits, and 8 or 4 bits each lose one more."""
    stored = {"seconds": 1.0, "stored": {"weights": 5_000_000, "kv_per_token": 1234.0}}
    if task == "perplexity":
        text = {"metric": "perplexity", "perplexity": 20.0, "bits_per_byte": 1.0, "kl": None, **stored}
        return MeasuredCell(point, task, Measurement.from_dict(text), None)
    if point.bits == 3 and point.granularity == "tensor":
        return MeasuredCell(point, task, None, "the <model> computes NaN")
    right = {16: 6, 8: 5, 4: 4, 3: 3}[point.bits]
    values = [int(i < right) for i in range(10)]
    layers = [{"layer": 0, "calls": 2, "entries": 100, "clipped": 7, "step_mean": 0.25, "step_max": 0.5}]
    extra = {} if point.is_baseline else {"logit_report": layers}
    cell = {"metric": "acc_norm", "score": right / 10, "n": 10, "values": values, "choices": values}
    return MeasuredCell(point, task, Measurement.from_dict({**cell, **extra, **stored}), None)


@pytest.fixture
def sweep():
    cells = [measured(point, task) for point in points(MODELS, OPTIONS) for task in OPTIONS.tasks]
    settings = {
        "date": "2026-01-01 00:00 UTC",
        "options": {"bits": [8, 4, 3]},
        "tasks": [{"name": "hellaswag", "n": 10}],
        "models": {"transformer": "ab" * 32},
        "quantized": [],
        "versions": {"torch": "2"},
        "dtype": "float32",
    }
    return SweepResult(cells, settings)


def test_a_sweep_is_read_back_as_it_was_written(sweep, tmp_path):
    (tmp_path / "sweep.json").write_text(sweep.to_json())
    again = read_sweep(tmp_path / "sweep.json")
    assert again.to_json() == sweep.to_json()
    assert text_table(again) == text_table(sweep)


def test_changes_that_were_not_committed_are_said(sweep):
    assert "uncommitted" not in text_table(sweep)
    cell = next(cell for cell in sweep.cells if cell.measurement)
    changed = replace(cell, measurement=replace(cell.measurement, commit="0123+changes"))
    cells = [changed if each is cell else each for each in sweep.cells]
    note = f"1 of {len(cells)} cells were measured by code with uncommitted changes."
    assert note in text_table(replace(sweep, cells=cells))
    assert note in report_html(replace(sweep, cells=cells))


def test_the_first_row_of_a_model_is_16_bits_and_the_others_compare_with_it(sweep):
    table = text_table(sweep).splitlines()
    assert table[0].split("  ")[0] == "model"
    assert re.match(r"transformer +- +16 +60\.0% ± 16\.3% +- ", table[2])
    assert re.match(r"transformer +logits +8:row +50\.0% ± 16\.7% +-10\.0 \[-.*\] +\+0 -1 +83\.3% +20 ", table[3])
    assert "10 items, zero-shot" in table[-3]


def test_a_failed_cell_is_said_to_have_failed(sweep):
    line = next(line for line in text_table(sweep).splitlines() if "3:tensor" in line)
    assert "failed" in line
    assert "20" in line


def test_csv_and_json_hold_the_same_numbers_in_full(sweep):
    records = json_rows(sweep)
    read = list(csv.DictReader(io.StringIO(csv_table(sweep))))
    assert [{k: "" if v is None else str(v) for k, v in record.items()} for record in records] == read
    assert records[2]["hellaswag lost"] == 2
    assert records[2]["hellaswag recovery"] == pytest.approx(4 / 6)


def test_a_line_runs_from_16_bits_down_and_leaves_out_what_failed(sweep):
    drawn = {(title, line.model): line.points for title, found in panels(sweep, "hellaswag").items() for line in found}
    per_row, per_tensor = "attention logits, per row", "attention logits, per tensor"
    assert set(drawn) == {(title, model) for title in (per_row, per_tensor) for model in ("transformer", "diff")}
    assert [(bits, round(d.value)) for bits, d in drawn[per_row, "diff"]] == [(16, 60), (8, 50), (4, 40), (3, 30)]
    assert [bits for bits, _ in drawn[per_tensor, "diff"]] == [16, 8, 4]


def test_bars_are_the_paired_interval_of_the_difference_from_16_bits(sweep):
    line = panels(sweep, "hellaswag")["attention logits, per row"][0]
    (_, full), (_, eight), *_ = line.points
    change = paired_difference([int(i < 5) for i in range(10)], [int(i < 6) for i in range(10)])
    assert (full.low, full.high) == (full.value, full.value)
    assert (eight.low, eight.high) == pytest.approx((60 + 100 * change.low, 60 + 100 * change.high))


def test_a_share_has_no_bar_beyond_all(sweep):
    all_right = TaskResult(metric="acc", score=1.0, n=10, values=[1.0] * 10)
    assert ItemColumns().drawn(Compared(all_right, all_right)).high == 100


def test_a_text_is_drawn_as_kl_with_its_interval_over_windows_and_not_at_16_bits():
    text = kind_of("perplexity").columns
    kl = TaskResult(metric="perplexity", details={"kl": 0.3, "kl_by_window": [0.2, 0.5], "tokens_by_window": [64, 32]})
    interval = mean_interval([0.2, 0.5], [64, 32])
    assert text.drawn(Compared(kl, None)) == (0.3, interval.low, interval.high)
    earlier = TaskResult(metric="perplexity", details={"kl": 0.3})
    assert text.drawn(Compared(earlier, None)) == (0.3, 0.3, 0.3)
    assert text.drawn(Compared(TaskResult(metric="perplexity", details={"kl": None}), None)) is None


def test_every_task_and_granularity_has_a_panel_of_its_own(sweep, tmp_path):
    figure = sweep_plot._figure(sweep)
    shown = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert shown == ["attention logits, per row", "attention logits, per tensor"]
    assert len({axis.get_ylim() for axis in figure.axes}) == 1
    assert figure.axes[0].get_ylim()[0] == 0
    assert len(figure.legends[0].get_texts()) == 2


def test_what_is_static_is_not_said_to_be_per_static():
    static = points([Path("m")], SweepOptions(bits=(8,), granularities=("static",)))[1]
    assert sweep_plot.panel_title(static) == "attention logits, static"


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
    assert all(reference.startswith("#") for reference in reader.found)
    assert not {"script", "link", "iframe", "img"} & set(reader.tags)
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert {"table", "svg", "details"} <= set(reader.tags)


def test_the_report_shows_failures_escaped_clipping_and_settings(sweep):
    text = report_html(sweep)
    assert "2 of 28 cells failed" in text
    assert "the &lt;model&gt; computes NaN" in text
    assert "clipped 7.00%" in text
    assert "ab" * 32 in text


def test_the_report_escapes_the_names_of_models(sweep):
    renamed = {Path("transformer"): Path("<script>alert(1)<!--"), Path("diff"): Path("diff")}
    cells = [replace(cell, point=replace(cell.point, model=renamed[cell.point.model])) for cell in sweep.cells]
    reader = References()
    reader.feed(report_html(SweepResult(cells, sweep.settings)))
    assert "script" not in reader.tags
    assert "details" in reader.tags  # which stand below the tables that hold the name


@pytest.mark.parametrize("name", ["$\\frac$", "$$", "$x$", "a$b"])
def test_a_name_is_drawn_letter_by_letter(sweep, tmp_path, name):
    renamed = {Path("transformer"): Path(name), Path("diff"): Path("diff")}
    cells = [replace(cell, point=replace(cell.point, model=renamed[cell.point.model])) for cell in sweep.cells]
    figure = sweep_plot._figure(SweepResult(cells, sweep.settings))
    figure.savefig(tmp_path / "plot.svg")
    (legend,) = figure.legends
    drawn = [text._preprocess_math(text.get_text()) for text in legend.get_texts()]
    assert (name, False) in drawn


def test_outputs_of_a_real_sweep_are_written_and_listed(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    result = run_sweep([model], SweepOptions(bits=(4,), task_options={"limit": 4}, dtype="float32"), tmp_path / "out")
    written = write_outputs(result, tmp_path / "out")
    assert [file.name for file in written] == ["table.csv", "plot.png", "report.html"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"cells", "sweep.json", *(f.name for f in written)}
    assert written[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["settings"]["tasks"][0]["n"] == 4


def test_a_sweep_of_16_bits_alone_has_a_table_and_no_plot(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    result = run_sweep([model], SweepOptions(bits=(16,), task_options={"limit": 2}, dtype="float32"), tmp_path / "out")
    write_outputs(result, tmp_path / "out")
    assert not (tmp_path / "out" / "plot.png").exists()
    assert (tmp_path / "out" / "report.html").exists()
