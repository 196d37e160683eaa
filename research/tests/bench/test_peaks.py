"""Memory of a finished bench, measured again."""

from dataclasses import replace

import pytest
import torch

from diffquant.benchmarks import peers
from diffquant.benchmarks.cells import BenchCell, BenchResult
from diffquant.benchmarks.report import markdown
from diffquant.errors import UsageError
from research.bench import peaks


def result(*cells):
    environment = {"date": "2026-01-01", "device": "a CPU", "cores": 2, "versions": {"torch": "2"}}
    return BenchResult(environment, {"threads": 2}, cells)


def test_memory_is_measured_again_for_the_paths_that_are_known_and_the_result_says_so(tmp_path):
    workload = "smollm2-135m-diff-v2, 1024 tokens, batch 1, float32"
    cells = (
        BenchCell("attention", workload, peers.BASELINE, values=(1.0,), peak_bytes=0, length=1024),
        BenchCell("attention", workload, "a path of old", values=(1.0,), peak_bytes=7, length=1024),
        BenchCell("linear", "1 -> 1, 1 tokens, float32", "dense", values=(1.0,), peak_bytes=7),
    )
    before = replace(result(*cells), settings={"threads": 1, "device": "cpu"})
    now = peaks.measure_peaks(before)
    # The output at least, 9 pairs' two heads of 64 floats, as exactly as Linux counts pages.
    assert now.cells[0].peak_bytes >= 4 * 1024 * 9 * 2 * 64 - (1 << 18)
    assert [each.peak_bytes for each in now.cells[1:]] == [None, 7]
    assert f"torch {torch.__version__}" in markdown(now)
    with pytest.raises(UsageError, match="of cuda; its memory is measured with its times"):
        peaks.measure_peaks(replace(before, settings={"device": "cuda"}))
