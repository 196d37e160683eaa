"""What is committed of opening files and starting commands keeps what is promised of it."""

import json
from pathlib import Path

import pytest

from research.bench.programs import cold_start, opening

RESULTS = Path(__file__).parents[3] / "bench" / "results"


def test_a_gguf_file_is_read_in_a_fifth_of_transformers_time():
    result = json.loads((RESULTS / "opening.json").read_text())
    assert result["ratio"] >= 5
    assert f"{result['ratio']:.1f} times as long" in opening.opening_summary(result)


def test_inspect_starts_within_a_third_more_than_torch_takes():
    result = json.loads((RESULTS / "inspect-motif-2-12.7b.json").read_text())
    assert max(result["ratio"], result["cpu_ratio"]) <= 1.3
    assert f"takes {result['ratio']:.2f} times as long" in cold_start.cold_start_summary(result)


def turn(seconds, cpu_seconds):
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def test_ratios_are_medians_of_turns_that_followed_one_another():
    turns = {
        "import torch": [turn(1.0, 1.0), turn(4.0, 1.0), turn(1.0, 1.0)],
        "diffquant inspect": [turn(1.5, 2.0), turn(4.0, 2.0), turn(1.2, 2.0)],
    }
    assert cold_start._ratio(turns, "seconds") == pytest.approx(1.2)
    assert cold_start._ratio(turns, "cpu_seconds") == pytest.approx(2.0)
