"""`make figure8-gpu`, rehearsed on a processor at about a thousandth: nine trainings' program, with three."""

from dataclasses import replace

import pytest
import torch

from diffquant.errors import DiffQuantError, UsageError
from research.figure8 import gpu, plan, ranges, scoring, text
from research.figure8.plan import KINDS, RESULTS, results
from research.train.models import matched
from research.train.settings import Schedule


@pytest.fixture(autouse=True)
def _a_thousandth(monkeypatch):
    monkeypatch.setattr(text, "HELD_OUT", 16)
    monkeypatch.setattr(scoring, "SCHEMES", ["4:tensor"])
    monkeypatch.setattr(scoring, "OPERANDS", ["4:row"])
    monkeypatch.setattr(scoring, "FORMATS", ["logits nvfp4"])
    monkeypatch.setattr(scoring, "BOOKS", scoring.Settings(passages=2, windows=2, window=32))
    monkeypatch.setattr(scoring, "WEB", scoring.Settings(passages=2, windows=1, window=32))
    monkeypatch.setattr(ranges, "LENGTHS", (32, 64))
    small = replace(plan.SIZES["16M"], hidden=32, layers=2, heads=2, head_dim=16, inner=64)
    monkeypatch.setitem(plan.SIZES, "16M", small)
    for name, value in {"SEEDS": (201,), "STEPS": 4, "LENGTH": 64, "TOKENS": 128, "EVERY": 2}.items():
        monkeypatch.setattr(gpu, name, value)
    with torch.enable_grad():
        yield


def rehearsed(books, folder, monkeypatch, minutes=60.0, together=9):
    monkeypatch.setattr(gpu, "BUILD", folder / "build")
    gpu.main(books, "cpu", together, minutes, folder / "raw")
    return results(folder / "raw")


def test_the_trainings_have_16_million_parameters_and_the_rate_of_the_protocol(monkeypatch):
    monkeypatch.undo()
    counts = []
    for kind in KINDS:
        with torch.device("meta"):
            counts.append(gpu.DiffTransformer(matched(kind, plan.SIZES["16M"], 2048)).num_parameters())
    assert max(counts) / min(counts) < 1.005
    assert round(min(counts) / 1e6, 1) == 15.9
    there = gpu.jobs(results(RESULTS))
    assert [(job.kind, job.seed) for job in there] == [(kind, seed) for seed in (201, 202, 203) for kind in KINDS]
    assert [job.rate for job in there] == pytest.approx([2.46e-3] * 9, rel=1e-2)
    schedule = there[0].schedule
    assert schedule == Schedule(1500, 100, 16384, ((0.0, 1024),), there[0].rate, accumulate=2, seed=201)
    # No window of the text that E1 to E7 have is read twice.
    assert results(RESULTS)["e1-diff-v1-seed-101"]["training_text"]["training_tokens"] >= 1500 * 2 * 16384


def test_nine_trainings_are_rehearsed_interrupted_and_straight(books, tmp_path, monkeypatch):
    straight = rehearsed(books, tmp_path / "straight", monkeypatch)
    assert straight.keys() == {f"e8-{kind}-seed-201" for kind in KINDS}
    for result in straight.values():
        assert result["arithmetic"] == "bf16-autocast"
        assert result["losses"].keys() == {"2", "4"}
        assert result["books"]["kl"]["4:tensor"][0] > 0
        assert result["range_by_length"]["64"]["first"]["nll"] > 0
        environment = result["environment"]
        assert {"date", "commit", "device", "versions", "instructions"} <= environment.keys()
    with pytest.raises(DiffQuantError, match="time is up at step 1; the same command goes on"):
        rehearsed(books, tmp_path / "parts", monkeypatch, minutes=0.0, together=2)
    assert not (tmp_path / "parts" / "raw").exists()
    resumed = rehearsed(books, tmp_path / "parts", monkeypatch, together=2)
    for name, result in straight.items():
        assert resumed[name]["weights"] == result["weights"]
        assert resumed[name]["books"] == result["books"]
    with pytest.raises(UsageError, match="raw files of all trainings of E8"):
        rehearsed(books, tmp_path / "parts", monkeypatch)


def test_a_training_that_diverges_is_a_result_and_the_others_go_on(books, tmp_path, monkeypatch):
    differentiate = gpu._Training._differentiate

    def differentiated(self, ids, weights):
        loss = differentiate(self, ids, weights)
        return loss * float("nan") if self.job.kind == "diff-v1" else loss

    monkeypatch.setattr(gpu._Training, "_differentiate", differentiated)
    monkeypatch.setattr(gpu, "scores", lambda *_: {"books": "scored"})
    found = rehearsed(books, tmp_path, monkeypatch)
    assert "not finite" in found["e8-diff-v1-seed-201"]["diverged"]
    assert found["e8-diff-v2-seed-201"]["books"] == "scored"


def test_the_makefile_has_the_command():
    recipe = (RESULTS.parents[2] / "Makefile").read_text(encoding="utf-8").partition("\nfigure8-gpu:")[2]
    assert "-m research.figure8.gpu --text" in recipe.partition("\n\n")[0]


def test_a_raw_file_that_decides_a_rate_is_asked_for(monkeypatch):
    monkeypatch.setattr(gpu, "results", lambda folder: {})
    with pytest.raises(UsageError, match="decide the rate of transformer, diff-v1, diff-v2"):
        gpu.jobs({})
