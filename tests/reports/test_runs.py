"""`diffquant report`: pages of runs written anew, and an index that leads to them."""

import json
import lzma
import re

import pytest
from typer.testing import CliRunner

import diffquant
from diffquant.errors import UsageError
from diffquant.verbs.cli import app
from tests.support.earlier_results import write_recorded


@pytest.fixture
def runs(tmp_path):
    write_recorded("smollm2-logits-500/sweep.json", tmp_path / "runs" / "a <b>" / "sweep.json")
    write_recorded("figure8-outliers/outliers.json", tmp_path / "runs" / "outliers" / "outliers.json")
    return tmp_path / "runs"


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def links(page):
    return re.findall(r'<a href="([^"]*)">([^<]*)</a>', page.read_text())


def test_runs_of_every_kind_get_pages_that_lead_to_each_other(runs):
    done = report(runs)
    assert done.exit_code == 0, done.output
    assert done.output == f"wrote {runs / 'index.html'} and the pages of 2 runs\n"
    assert links(runs / "index.html") == [
        ("./a%20%3Cb%3E/report.html", "a &lt;b&gt;"),
        ("./outliers/outliers.html", "outliers"),
    ]
    sweep, outliers = runs / "a <b>" / "report.html", runs / "outliers" / "outliers.html"
    assert links(sweep) == [
        ("../index.html", "all runs"),
        ("../outliers/outliers.html", "next →"),
        ("./sweep.json", "sweep.json"),
    ]
    assert ("../a%20%3Cb%3E/report.html", "← before") in links(outliers)
    assert (
        "<title>a &lt;b&gt;: SmolLM2-135M-Instruct.Q4_1, smollm2-135m-diff-v2 · diffquant sweep</title>"
        in sweep.read_text()
    )
    assert "The largest attention logit is 33 in prose-diff-v1" in (runs / "index.html").read_text()
    assert report(runs).exit_code == 0  # an index of ours may be replaced


def test_a_page_that_is_no_index_is_not_replaced(runs):
    (runs / "index.html").write_text("<title>mine</title>")
    assert "holds index.html, which diffquant did not write" in str(report(runs).exception)
    assert (runs / "index.html").read_text() == "<title>mine</title>"
    assert report(runs, "-o", runs / "all.html").exit_code == 0
    # Even one that is not there yet: the index would take the place of the page that it links to.
    page = runs / "outliers" / "outliers.html"
    page.unlink()
    assert "is the page of a run, which the index would replace" in str(report(runs, "-o", page).exception)


def test_an_index_makes_its_folder(runs, tmp_path):
    index = tmp_path / "site" / "runs" / "index.html"
    assert report(runs, "-o", index).exit_code == 0
    assert ("../../runs/outliers/outliers.html", "../../runs/outliers") in links(index)


def test_folders_without_runs_and_damaged_runs_are_named(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "empty"], r"no run in or below .*empty: none has a sweep\.json"),
        ([tmp_path / "nowhere"], "no such folder: .*nowhere"),
    ):
        done = report(*arguments)
        assert isinstance(done.exception, UsageError)
        assert re.search(message, str(done.exception))
    data = json.loads((runs / "outliers" / "outliers.json").read_text())
    del data["models"]
    (runs / "outliers" / "outliers.json").write_text(json.dumps(data))
    done = report(runs)
    assert re.search(r"cannot read outliers\.json in .*outliers: KeyError: 'models'", str(done.exception))


def test_compressed_results_are_read_as_they_were(runs):
    """NAME.json.xz in the place of NAME.json."""
    plain = runs / "a <b>" / "sweep.json"
    sides = [f"{plain.parent}@SmolLM2-135M-Instruct.Q4_1 {scheme}" for scheme in ("16", "6:tensor")]
    compared = diffquant.compare(*sides).summary()
    for file in runs.rglob("*.json"):
        file.with_name(f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes()))
        file.unlink()
    assert report(runs).exit_code == 0
    assert ("./sweep.json.xz", "sweep.json.xz") in links(plain.with_name("report.html"))
    assert ("./outliers.json.xz", "outliers.json.xz") in links(runs / "outliers" / "outliers.html")
    assert diffquant.compare(*sides).summary() == compared


def test_a_damaged_compressed_result_is_an_error_of_one_line(runs):
    (runs / "outliers" / "outliers.json").rename(runs / "outliers" / "outliers.json.xz")
    assert "outliers.json.xz is damaged" in str(report(runs).exception)
