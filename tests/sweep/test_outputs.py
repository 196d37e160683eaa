import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diffquant.sweep import SweepOptions, SweepResult, run_sweep, write_outputs
from diffquant.sweep.grid import points
from diffquant.sweep.measurement import Measurement
from diffquant.sweep.plot import lines
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
    drawn = {(line.model, line.granularity): line.points for line in lines(sweep, "logits")}
    assert set(drawn) == {(m, g) for m in ("transformer", "diff") for g in ("row", "tensor")}
    assert [(bits, round(value)) for bits, value, _ in drawn["diff", "row"]] == [(16, 60), (8, 50), (4, 40), (3, 30)]
    assert [bits for bits, _, _ in drawn["diff", "tensor"]] == [16, 8, 4]


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
