"""The program of Figure 8's runs: a raw file from a text, whether it was interrupted on the way or not."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import diffquant
from diffquant import data
from diffquant.data import pocket_models
from diffquant.errors import DiffQuantError, OutputExistsError, UsageError
from research.figure8 import plan, run, scoring, ship, text
from research.figure8.plan import Run, results
from research.studies.kv_decoded import CacheForm, measure_forms
from research.train.kernels import is_supported
from research.train.settings import Schedule

SCHEMES = ["4:tensor", "3:row:shift"]


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Runs of four steps, scored under two schemes on three short passages."""
    monkeypatch.setattr(text, "HELD_OUT", 16)
    monkeypatch.setattr(scoring, "SCHEMES", SCHEMES)
    monkeypatch.setattr(scoring, "OPERANDS", ["4:row"])
    monkeypatch.setattr(scoring, "STEPS", (2.0,))
    monkeypatch.setattr(scoring, "BOOKS", scoring.Settings(passages=3, windows=2, window=32))
    monkeypatch.setattr(scoring, "WEB", scoring.Settings(passages=3, windows=2, window=32))
    monkeypatch.setattr(run, "EVERY", 2)
    monkeypatch.setattr(plan, "TOKENS_PER_STEP", 512)
    with torch.enable_grad():
        yield


def made(kind, books, folder, monkeypatch, times=(0.0,), minutes=1.0):
    """Raw result of a run whose clock shows `times` and then stands still."""
    ticks = itertools.chain(times, itertools.repeat(times[-1]))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(run, "BUILD", folder / "build")
    monkeypatch.setattr(run, "scores", lambda *_: {"books": "scored"})
    planned = Run(f"e1-{kind}-rate-4e-3", kind, "1.25M", 4, "4e-3", 100, "bf16")
    run.train_and_score(planned, books, folder / "raw", 60 * minutes)
    return results(folder / "raw")[planned.name]


def test_an_interrupted_run_has_the_results_of_a_straight_one(books, tmp_path, monkeypatch):
    kind = "diff-v1"
    straight = made(kind, books, tmp_path / "straight", monkeypatch)
    with pytest.raises(DiffQuantError, match="time is up at step 2; the same command goes on"):
        made(kind, books, tmp_path / "parts", monkeypatch, times=(0.0, 61.0))
    assert not (tmp_path / "parts" / "raw").exists()
    resumed = made(kind, books, tmp_path / "parts", monkeypatch)
    assert [each["cpu"] for each in resumed.pop("earlier_environments")] == [straight["environment"]["cpu"]]
    del resumed["environment"], straight["environment"]
    assert resumed == straight
    assert straight["books"] == "scored"
    assert len(straight["weights"]) == 64
    assert straight["losses"].keys() == {"2", "4"}


def test_a_model_that_ships_is_its_runs_in_16_bits_and_says_how_it_was_trained(books, tmp_path, monkeypatch):
    trained = made("diff-v1", books, tmp_path, monkeypatch)
    trained["books"] = {"nll": [3.5, 4.5], "kl": {"4:tensor": [0.25, 0.75], "4:row:shift": [0.0, 0.5], "4:row": [1.0]}}
    folder, shipped = tmp_path / "build" / trained["run"], tmp_path / "shipped"
    ship.ship(Run(trained["run"], "diff-v1", "1.25M", 4, "4e-3", 100, "bf16"), trained, folder, shipped)
    exact, model = (diffquant.load(path, dtype="float32") for path in (folder / "model", shipped))
    weights = dict(model.named_parameters())
    assert all(torch.equal(p.bfloat16().float(), weights[name]) for name, p in exact.named_parameters())
    tokenizers = [diffquant.load_tokenizer(path) for path in (folder / "model", shipped)]
    assert tokenizers[0](data.books_text()[:999])["input_ids"] == tokenizers[1](data.books_text()[:999])["input_ids"]
    said = json.loads((shipped / "training.json").read_text())
    assert said.items() >= {key: trained[key] for key in ("run", "kind", "weights", "validation")}.items()
    assert said["books"] == {"nll": 4.0, "kl": {"4:tensor": 0.5, "4:row:shift": 0.25}}
    assert said["schedule"].items() >= {"steps": 4, "rate": trained["rate"], "seed": 100}.items()
    assert sorted(file.name for file in shipped.iterdir()) == sorted(
        ["config.json", "log.jsonl", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json"]
    )
    with pytest.raises(OutputExistsError, match="shipped exists"):
        ship.ship(plan.listed()[0], trained, folder, shipped)


@pytest.mark.parametrize("kind", plan.KINDS)
def test_large_logits_on_purpose_are_the_same_training_at_another_rate(kind):
    usual, ours = (Run("x", name, "1.25M", 4, "4e-3", 101, "bf16") for name in (kind, kind + plan.OUTLIERS))
    weights, same = (run.new_model(each, 320).state_dict() for each in (usual, ours))
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    lengths = ((0.0, 128), (0.5, 256))
    assert usual.schedule(4e-3) == Schedule(4, 100, 512, lengths, rate=4e-3, decay=0.1, clip=1.0, seed=101)
    assert ours.schedule(16e-3) == replace(usual.schedule(4e-3), rate=16e-3)


def test_a_training_whose_loss_is_no_number_is_a_result(books, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "rate_of", lambda *_: 1e38)
    result = made("transformer", books, tmp_path, monkeypatch)
    assert "lower the learning rate" in result["diverged"]
    assert result["validation"]["nll"] is None
    assert "books" not in result


def test_so_is_one_whose_last_step_leaves_weights_that_are_no_numbers(books, tmp_path, monkeypatch):
    trained = run.train

    def train(planned, rate, model, *others):
        trained(planned, rate, model, *others)
        next(model.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(run, "train", train)
    result = made("transformer", books, tmp_path, monkeypatch)
    assert "the loss on held-out text is nan" in result["diverged"]
    assert "books" not in result


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"training_text": {"sha256": "f00d"}}, "another text, of SHA-256 f00d"),
        ({"arithmetic": "another"}, "are of another, and this processor would train in"),
    ],
)
def test_a_run_that_could_not_be_compared_is_refused_before_it_trains(changed, said, books, tmp_path, monkeypatch):
    digest = text.TrainingText(data.books_text(), tmp_path / "build").digest
    usual = {"training_text": {"sha256": digest}, "arithmetic": "bf16" if is_supported() else "float32", "steps": 8}
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "e1-diff-v2-rate-4e-3.json").write_text(json.dumps(usual | changed))
    with pytest.raises(UsageError, match=said):
        made("diff-v1", books, tmp_path, monkeypatch)
    assert not (tmp_path / "build" / "e1-diff-v1-rate-4e-3").exists()


def test_a_model_that_was_only_read_says_nothing_of_the_arithmetic_of_trainings():
    planned = next(each for each in run.listed() if each.name == "e6-transformer-seed-113")
    ours = {"training_text": {"sha256": "f00d"}, "arithmetic": "bf16", "steps": 1800}
    read = ours | {"arithmetic": "float32", "steps": 0}
    run.check_fits(planned, ours, {"e1-transformer-seed-101": ours, "e6-transformer-read-seed-101": read})
    with pytest.raises(UsageError, match="are of float32"):
        run.check_fits(planned, ours, {"e1-transformer-seed-101": ours | {"arithmetic": "float32"}})


def test_held_out_windows_are_never_trained_on(books, tmp_path):
    made_of = text.TrainingText(data.books_text(), tmp_path)
    held_out = {bytes(window) for window in made_of.held_out[:, 1:].to(torch.uint8)}
    windows = 0
    for step in range(60):
        ids, _ = made_of.batch(0, step, 4, text.WINDOW)
        windows += len(ids)
        assert not held_out & {bytes(window) for window in ids[:, 1:].to(torch.uint8)}
    assert windows * text.WINDOW > 0.7 * made_of.describe()["training_tokens"]


def test_two_processes_never_take_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BUILD", tmp_path)
    with run.claimed(None, tmp_path) as first, run.claimed(None, tmp_path) as second:
        assert first != second
        with pytest.raises(UsageError, match="another process"), run.claimed(first.name, tmp_path):
            pass


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("e1-diff-v1-seed-101", "decide the rate of e1-diff-v1-seed-101"),
        ("e1-diff-v1-rate-4e-3", "has a raw file"),
        ("e1-diff-v3", "has no run 'e1-diff-v3'"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_by_name(name, said, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BUILD", tmp_path)
    (tmp_path / "e1-diff-v1-rate-4e-3.json").write_text("{}")
    with pytest.raises(UsageError, match=said), run.claimed(name, tmp_path):
        pass


def test_a_text_too_short_to_hold_any_out_is_refused(tmp_path):
    with pytest.raises(UsageError, match="tokens; give one of"):
        text.TrainingText(data.books_text()[:20000], tmp_path)


def test_every_passage_of_every_kind_is_scored(tmp_path):
    tokenizer = text.TrainingText(data.books_text(), tmp_path).tokenizer
    for kind in ("gated", "diff-v2-equalized"):
        model = run.new_model(Run("x", kind, "1.25M", 4, "4e-3", 100, "bf16"), len(tokenizer))
        found = scoring.scores(model, tokenizer)
        names = ("kl", "kl_of_qk", "kl_of_formats", "kl_of_steps")
        for part in (*(found["books"][name] for name in names), found["web"]["kl"]):
            assert all(len(values) == 3 and min(values) > 0 for values in part.values())
        assert found["outliers"]["overall"]["logits"]["top"][1] > 0


def test_caches_of_the_larger_models_are_read_as_the_study_of_small_ones_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "CACHES", ("8:row, 8:row", "3:c32, 3:row:rotated"))
    monkeypatch.setattr(scoring, "CACHE_CHARACTERS", 250)
    (model,) = (path for path in pocket_models("prose") if path.name == "prose-diff-v2")
    # As it is after its training.
    with torch.enable_grad():
        trained = diffquant.load(model, dtype="float32").requires_grad_()
        found = scoring.caches(trained, diffquant.load_tokenizer(model))
    assert found["reading"]["scored"] == 16
    forms = [CacheForm.named(name) for name in scoring.CACHES]
    assert found["rows"] == {
        name: {key: row[key] for key in found["rows"][name]}
        for name, row in measure_forms(model, forms, 250, 32, 16, 64, tmp_path / "kv.json")["results"].items()
    }
    assert found["rows"]["3:c32, 3:row:rotated"]["prose"]["kl"] > found["rows"]["8:row, 8:row"]["prose"]["kl"] > 0
