"""Ranges of logits beside a model's own projections, and their recording beside a training without it."""

import itertools
import math

import pytest
import torch

import diffquant
from diffquant import data
from diffquant.calib.outliers import measure_magnitudes
from diffquant.data import pocket_models
from research.figure8 import plan, ranges, run, scoring, text
from research.figure8.plan import KINDS, Run, results


@pytest.fixture(autouse=True)
def _a_thousandth(monkeypatch, tmp_path):
    """Runs of four steps of 512 tokens, read in short windows."""
    monkeypatch.setattr(text, "HELD_OUT", 16)
    monkeypatch.setattr(scoring, "BOOKS", scoring.Settings(passages=3, windows=2, window=32))
    monkeypatch.setattr(ranges, "LENGTHS", (32, 64))
    monkeypatch.setattr(run, "EVERY", 3)
    monkeypatch.setattr(plan, "TOKENS_PER_STEP", 512)
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")
    monkeypatch.setattr(run, "scores", lambda *_: {"books": "scored"})
    with torch.enable_grad():
        yield


@pytest.fixture(scope="module", params=KINDS)
def pocket(request):
    (path,) = (path for path in pocket_models("prose") if path.name == f"prose-{request.param}")
    return diffquant.load(path, dtype="float32")


def logits_of(model, ids):
    """Logits [maps, B, h, T, T] of the first layer, from its projections."""
    module, seen = model.attention_modules[0], []
    handle = module.register_forward_hook(lambda _, arguments, __: seen.append(arguments))
    model.model(input_ids=ids, use_cache=False)
    handle.remove()
    x, rotary, _, _ = seen[0]
    q, k, _ = module.project(x, rotary)
    spec = module.spec
    keys = torch.cat([k] * (spec.maps if spec.shared_k else 1), 1)
    return (q @ keys.mT * spec.scale).unflatten(1, (spec.maps, -1)).transpose(0, 1)


@torch.no_grad()
def test_ranges_are_those_of_the_projections_loop_by_loop(pocket):
    ids = torch.randint(2, 2048, (2, 300), generator=torch.Generator().manual_seed(1))
    (first, *_) = ranges.ranges(pocket, ids.split(1))
    for number, of_map in enumerate(logits_of(pocket, ids)):
        lower = [of_map[b, h, t, : t + 1] for b, h, t in itertools.product(*map(range, of_map.shape[:3]))]
        assert first["largest"][number] == pytest.approx(max(float(row.abs().max()) for row in lower), rel=1e-5)
        assert first["near"][number] == pytest.approx(max(float(row[-256:].abs().max()) for row in lower), rel=1e-5)
        assert first["on_first"][number] == pytest.approx(max(float(row[0].abs()) for row in lower), rel=1e-5)
        squares = torch.cat(lower).double().square().mean().sqrt()
        assert first["rms"][number] == pytest.approx(float(squares), rel=1e-5)
        weights = [float(row.softmax(0)[0]) for row in lower if len(row) > 1]
        assert first["weight_on_first"][number] == pytest.approx(sum(weights) / len(weights), rel=1e-4)


@torch.no_grad()
def test_the_largest_are_those_of_table_5(pocket):
    ids = torch.randint(2, 2048, (3, 40), generator=torch.Generator().manual_seed(2))
    layers, _ = measure_magnitudes(pocket, ids)
    for ours, theirs in zip(ranges.ranges(pocket, [ids]), layers, strict=True):
        assert max(ours["largest"]) == pytest.approx(theirs["logits"].top[1], rel=1e-5)


def test_marks_grow_by_the_root_of_two_to_the_last_step():
    found = ranges.marks(1800)
    assert found[0] == 0
    assert len(found) == 17
    assert found[-1] == 1800
    assert {225, 450, 900} <= set(found)
    ratios = [after / before for before, after in itertools.pairwise(found[1:])]
    assert all(abs(ratio - math.sqrt(2)) < 0.1 for ratio in ratios)


def trained(name, kind, books, folder, monkeypatch, size="1.25M"):
    monkeypatch.setattr(run, "BUILD", folder / "build")
    run.train_and_score(Run(name, kind, size, 4, "4e-3", 113, "bf16"), books, folder / "raw", math.inf)
    return results(folder / "raw")[name]


def test_recording_changes_no_weight_of_a_training(books, tmp_path, monkeypatch):
    ours = trained("e6-diff-v1-seed-113", "diff-v1", books, tmp_path / "ours", monkeypatch)
    usual = trained("e1-diff-v1-seed-113", "diff-v1", books, tmp_path / "usual", monkeypatch)
    assert ours["weights"] == usual["weights"]
    assert list(ours["range_by_step"]) == ["0", "1", "2", "3", "4"]
    assert ours["range_by_length"].keys() == {"32", "64"}
    last, [read] = ours["range_by_step"]["4"], [each for each in ours["range_by_step"] if each == "0"]
    assert last != ours["range_by_step"][read]
    assert len(last) == 5
    assert "range_by_step" not in usual


def test_an_interrupted_training_records_what_a_straight_one_does(books, tmp_path, monkeypatch):
    straight = trained("e6-diff-v2-seed-113", "diff-v2", books, tmp_path / "straight", monkeypatch)
    record, stopped = ranges.Trajectory.record, []

    def interrupt(self, step, model):
        record(self, step, model)
        if step == 3 and not stopped:
            stopped.append(step)
            raise KeyboardInterrupt

    monkeypatch.setattr(ranges.Trajectory, "record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trained("e6-diff-v2-seed-113", "diff-v2", books, tmp_path / "parts", monkeypatch)
    resumed = trained("e6-diff-v2-seed-113", "diff-v2", books, tmp_path / "parts", monkeypatch)
    assert resumed["range_by_step"] == straight["range_by_step"]
    assert resumed["weights"] == straight["weights"]


def test_other_recipes_are_other_trainings_from_the_same_start(books, tmp_path, monkeypatch):
    name = "e6-transformer{}-seed-113"
    usual = trained(name.format(""), "transformer", books, tmp_path, monkeypatch)
    for variant in (*plan.DECAYS, plan.NO_FIRST):
        other = trained(name.format(variant), "transformer" + variant, books, tmp_path, monkeypatch)
        assert other["weights"] != usual["weights"]
        assert other["range_by_step"]["0"] == usual["range_by_step"]["0"]
        schedule = Run(other["run"], other["kind"], "1.25M", 4, "best", 113, "bf16").schedule(1e-3)
        assert schedule.decay == plan.DECAYS.get(variant, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_layers_are_trained_and_recorded_with_as_many_parameters(kind, books, tmp_path, monkeypatch):
    deep = trained(f"e5-{kind}-seed-113", kind, books, tmp_path, monkeypatch, "1.25M-deep")
    assert len(deep["range_by_step"]["4"]) == 12
    five = results()[f"e1-{kind}-seed-101"]["parameters"]
    width = 80 * (text.VOCABULARY - deep_vocabulary(tmp_path))
    assert (deep["parameters"] + width) / five == pytest.approx(1, abs=0.005)


def deep_vocabulary(folder):
    """Number of tokens of the rehearsal's text."""
    return len(text.TrainingText(data.books_text(), folder / "build").tokenizer)


def test_the_rate_of_twelve_layers_is_the_best_of_three_at_a_quarter_of_the_tokens_carried_on():
    nll = {"": 4.0, "-double": 4.1, "-half": 3.9}
    there = dict(results()) | {f"e5-diff-v1-check{name}": {"validation": {"nll": each}} for name, each in nll.items()}
    found = {each.name: plan.rate_of(each, there) for each in plan.listed() if each.name.startswith("e5-diff-v1")}
    carried = 4e-3 * 128 / 80
    assert found["e5-diff-v1-check"] == pytest.approx(carried * 4**0.32, rel=1e-3)
    assert found["e5-diff-v1-check-double"] == pytest.approx(2 * carried * 4**0.32, rel=1e-3)
    assert found["e5-diff-v1-seed-103"] == pytest.approx(carried / 2, rel=1e-3)
    del there["e5-diff-v1-check-half"]
    assert all(plan.rate_of(each, there) is None for each in plan.listed() if each.name.startswith("e5-diff-v1-seed"))


def test_windows_without_their_first_token_weigh_alike(books, tmp_path):
    whole = text.TrainingText(data.books_text(), tmp_path)
    ids, weights = text.WithoutFirst(whole).batch(0, 3, 4, 128)
    assert torch.equal(ids, whole.batch(0, 3, 4, 128)[0][:, 1:])
    assert weights.shape == (4, 127)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert whole.tokenizer.bos_token_id not in ids


def test_a_model_that_ships_is_read_without_training(books, tmp_path, monkeypatch):
    (planned,) = (each for each in plan.listed() if each.name == "e6-diff-v2-read-seed-101")
    run.train_and_score(planned, books, tmp_path / "raw", math.inf)
    found = results(tmp_path / "raw")[planned.name]
    assert found["weights"] == found["base"]["weights"]
    assert found["range_by_length"]["64"]["first"]["nll"] > 0
    assert found["steps"] == 0
