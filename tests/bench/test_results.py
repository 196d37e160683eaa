"""Results: ratios, what counts as moved, files that cannot be read, and the outputs."""

import json
from dataclasses import replace

import pytest
import torch

from diffquant.benchmarks.cells import BenchCell, BenchResult, find_changes, read_result, summarize_changes
from diffquant.benchmarks.measuring import describe_environment
from diffquant.benchmarks.plots import plots
from diffquant.benchmarks.report import bench_report, csv_table, markdown
from diffquant.errors import UsageError
from diffquant.reports import page as pages
from tests.support.tables import in_one_test

# Torch's names for what it uses of a processor; others say that it uses nothing of these.
_OF_TORCH = {"AVX2": ["avx2"], "AVX512": ["avx2", "avx512f"], "SVE256": ["sve"]}


def cell(path, values, **more):
    return BenchCell(
        "attention", "3B, 512 tokens, batch 1, float32", path, values=tuple(values), baseline="base", **more
    )


def result(*cells, device="a CPU"):
    environment = {"date": "2026-01-01", "device": device, "cores": 2, "versions": {"torch": "2", "nncf": None}}
    return BenchResult(environment, {"threads": 2}, cells)


def test_ratios_are_times_better_whichever_way_the_unit_runs():
    slow, fast = cell("base", [4.0, 4.0]), cell("fast", [1.0, 2.0, 3.0])
    assert result(slow, fast).ratio(fast) == 2.0
    slow, fast = (replace(each, unit="tokens/s") for each in (cell("base", [10.0]), cell("fast", [30.0])))
    assert result(slow, fast).ratio(fast) == 3.0
    alone = cell("alone", [1.0])
    assert result(alone).ratio(alone) is None


@in_one_test(
    ("old", "new", "times"),
    [
        ([1.0, 1.1, 1.2], [0.5, 0.55, 0.6], 2.0),
        ([1.0, 1.1, 1.2], [2.2, 2.2, 2.2], 0.5),
        ([1.0, 1.1, 1.2], [1.15, 1.5, 2.0], None),  # repeats overlap
        ([1.00, 1.01, 1.01], [1.02, 1.03, 1.04], None),  # apart, but by less than machines drift
    ],
)
def test_only_what_lies_beyond_noise_has_moved(old, new, times):
    changes = find_changes(result(cell("x", old)), result(cell("x", new)))
    assert [round(times, 6) for times, _, _ in changes] == ([] if times is None else [times])


def test_a_comparison_names_what_is_new_gone_and_from_another_device():
    text = summarize_changes(result(cell("old", [1.0])), result(cell("new", [1.0]), device="a GPU"))
    assert text.splitlines()[0].startswith("different devices: a CPU, a GPU")
    assert "no longer measured: attention, 3B, 512 tokens, batch 1, float32, old" in text
    assert "measured for the first time: attention, 3B, 512 tokens, batch 1, float32, new" in text
    same = result(cell("x", [1.0]))
    assert summarize_changes(same, same) == "no change beyond noise"


def test_a_result_survives_its_file(tmp_path):
    cells = (cell("base", [1.0, 2.0], facts={"cache bytes": 3.0}, length=512), replace(cell("x", []), missing="why"))
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result(*cells).to_dict()))
    assert read_result(path).cells == cells


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "it is not JSON"),
        ("[]", "not a result of `diffquant bench`"),
        ('{"format": 99, "cells": []}', "not a result of `diffquant bench`"),
        ('{"format": 1, "cells": [{"path": "x"}], "environment": {}, "settings": {}}', "damaged"),
        ('{"format": 1, "cells": []}', "damaged"),
    ],
    ids=["absent", "no json", "list", "format", "cell", "no environment"],
)
def test_files_that_are_no_result_are_refused(tmp_path, text, reason):
    path = tmp_path / "old.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_result(path)


def test_reports_say_what_is_missing_and_load_nothing():
    found = result(
        cell("base", [4.0, 5.0], length=512, peak_bytes=10**6),
        cell("<fast>", [1.0], length=512, peak_bytes=10**5, error=1e-7),
        replace(cell("gone", []), missing="it runs only on CUDA", length=512),
    )
    page = pages.render_page(bench_report(found, "run", ["bench.json"]))
    assert page.count("<svg") == 2
    assert "attention: &lt;fast&gt; is 4.50 times as good as base (3B, 512 tokens, batch 1, float32)." in page
    assert "1 of 3 could not be measured." in page
    assert "&lt;fast&gt;" in page
    assert "gone: none, it runs only on CUDA" in page
    assert "src=" not in page
    assert 'href="http' not in page
    text = markdown(found)
    assert "| <fast> | 1 ms |" in text
    assert "- gone: none, it runs only on CUDA" in text
    assert len(csv_table(found).splitlines()) == 4


def test_plots_are_only_of_what_has_lengths(tmp_path):
    assert plots(result(cell("base", [1.0]))) == {}
    (drawn,) = plots(result(cell("base", [1.0], length=512), cell("base", [2.0], length=1024))).values()
    drawn[1].savefig(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 1000


def test_the_instructions_that_torch_uses_are_there():
    used = _OF_TORCH.get(torch.backends.cpu.get_cpu_capability(), [])
    assert set(used) <= set(describe_environment()["instructions"])
