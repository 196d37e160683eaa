"""outliers, calibrate and search as a user meets them: output, files, exit codes, one clear line."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support import tiny_lm
from tests.support.checkpoints import edit_json
from tests.support.tables import in_one_test

SHORT_READING = ("outliers", "--tokens", 128, "--window", 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_lm.write_llama(folder / "llama"), tiny_lm.write_diff_v2(folder / "diff-v2")


def test_outliers_stand_side_by_side_and_a_conversion_changes_none(run, models, tmp_path):
    code, out, err = run("outliers", *models, "-o", tmp_path / "o", "--tokens", 300, "--window", 64, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert json.loads((tmp_path / "o" / "outliers.json").read_text()) == found
    plain, diff = found["models"]
    assert (plain["generation"], diff["generation"]) == ("Transformer", "DIFF V2")
    assert plain["tokens"] == diff["tokens"] == 256
    assert len(plain["layers"]) == 2
    for kind in ("logits", "hidden"):
        assert diff["overall"][kind]["top"]["1"] == pytest.approx(plain["overall"][kind]["top"]["1"], rel=1e-4)
        assert diff["overall"][kind]["median"] == pytest.approx(plain["overall"][kind]["median"], rel=0.01)
    assert (tmp_path / "o" / "outliers.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("outliers", models[0], "--tokens", 128, "--window", 64)
    assert (code, out.splitlines()[0].split()[:4]) == (0, ["model", "activation", "top", "1"])


def test_a_model_that_cannot_be_read_is_told_before_another_is_measured(run, models, tmp_path, monkeypatch):
    monkeypatch.setattr("diffquant.calib.outliers.load", lambda *_, **__: pytest.fail("it was loaded"))
    bare = shutil.copytree(models[1], tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, err = run(*SHORT_READING, models[0], bare)
    assert (code, "bare: tokenizer.json is missing" in err) == (1, True), err
    short = shutil.copytree(models[0], tmp_path / "short")
    edit_json(short / "config.json", max_position_embeddings=32)
    code, _, err = run(*SHORT_READING, models[1], short)
    assert (code, "window 64 must be between 2 and the model's context, 32 tokens" in err) == (2, True), err


def test_models_whose_folders_are_called_alike_are_told_apart(run, models, tmp_path):
    folders = [shutil.copytree(model, tmp_path / letter / "hf") for model, letter in zip(models, "ab", strict=True)]
    code, out, err = run(*SHORT_READING, *folders, "--json")
    assert code == 0, err
    assert [model["name"] for model in json.loads(out)["models"]] == ["a/hf", "b/hf"]


def test_calibrated_scales_are_used_by_eval_and_sweep(run, models, tmp_path):
    file = tmp_path / "scales.safetensors"
    code, out, err = run("calibrate", models[1], "-o", file, "--tokens", 512, "--window", 64, "--observer", "absmax")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[2:6] if line] == ["k", "v", "logits"]
    with safe_open(file, framework="pt") as held:
        assert held.get_tensor("layers.1.k").shape == (2, 8)
        assert held.get_tensor("layers.1.logits").shape == (8,)
    text = ("--task", "perplexity", "--characters", 1500, "--window", 64, "--stride", 64)
    code, out, err = run(
        "eval", models[1], *text, "--kv", "8:static", "--logits", "8:static", "--scales", file, "--json"
    )
    assert code == 0, err
    sweep = ("sweep", *models, "-o", tmp_path / "s", *text, "--bits", 8, "--target", "kv", "--granularity", "static")
    assert run(*sweep, "--scales", file)[0] == 2
    code, out, err = run("sweep", models[1], *sweep[3:], "--scales", file)
    assert code == 0, err
    assert "8:static" in out
    code, _, err = run("sweep", models[1], *sweep[3:], "--scales", file, "--scales", file)
    assert (code, "are both ranges of" in err) == (2, True), err
    for bare in (("eval", models[1], "--limit", 2), ("sweep", models[1], "-o", tmp_path / "bare")):
        code, _, err = run(*bare, "--scales", file)
        assert (code, "no static scheme uses the ranges" in err) == (2, True), err
    code, _, err = run("eval", models[0], "--kv", "8:static", "--scales", file)
    assert (code, "calibrated on another model" in err) == (1, True), err
    assert run("calibrate", models[1], "-o", file)[::2] == (
        1,
        f"error: {file} exists; choose another output or pass --overwrite\n",
    )


@in_one_test(
    ("arguments", "code", "message"),
    [
        (("outliers", "MODEL", "--text", "EMPTY"), 2, "is empty"),
        (("outliers", "MODEL", "--text", "SHORT", "--window", "64"), 2, "fewer than one window of 64"),
        (("outliers", "MODEL", "--window", "100000"), 2, "must be between 2 and the model's context"),
        (("outliers", "MODEL", "--device", "cuda:77"), 2, "device"),
        (("outliers", "MODEL", "MODEL"), 2, "given twice"),
        (("outliers", "NOWHERE"), 1, "NOWHERE"),
        (("calibrate", "MODEL", "-o", "OUT", "--text", "SHORT", "--window", "16"), 2, "two are needed"),
        (("calibrate", "MODEL", "-o", "OUT", "--observer", "minmax"), 2, "unknown observer"),
        (("calibrate", "MODEL", "-o", "OUT", "--target", "q"), 2, "unknown target 'q'"),
        (("calibrate", "MODEL", "-o", "OUT", "--target", "k,hidden"), 2, "no scheme quantizes hidden states"),
        (("calibrate", "MODEL", "-o", "NO/WHERE"), 2, "does not exist"),
        (("calibrate", "MODEL", "-o", "OUT", "--device", "nowhere"), 2, "unknown device"),
        (("calibrate", "MODEL", "-o", "FOLDER", "--overwrite"), 2, "is a folder; name a file"),
        (("calibrate", "MODEL", "-o", "/proc/scales.safetensors"), 2, "cannot write into /proc"),
        (("outliers", "MODEL", "-o", "SHORT"), 2, "cannot write into"),
        (("search", "MODEL", "-o", "OUT", "--budget", "3", "--granularity", "g16"), 2, "below the narrowest width"),
        (("search", "MODEL", "-o", "OUT", "--budget", "few", "--granularity", "g16"), 2, "cannot read budget"),
        (("search", "MODEL", "-o", "OUT", "--budget", "4.5", "--bits", "4"), 2, "two or more widths"),
        (("eval", "MODEL", "--kv", "8:static"), 2, "need calibrated ranges"),
        (("eval", "MODEL", "--kv", "8:static", "--scales", "SHORT"), 1, "cannot read ranges"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, models, tmp_path, arguments, code, message):
    (tmp_path / "EMPTY").write_text(" \n")
    (tmp_path / "SHORT").write_text("One short line of words.")
    (tmp_path / "FOLDER").mkdir()
    names = ("EMPTY", "SHORT", "FOLDER", "OUT", "NO/WHERE", "NOWHERE")
    places = {"MODEL": models[1], **{name: tmp_path / name for name in names}}
    got, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert (got, out) == (code, ""), err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["EMPTY", "FOLDER", "SHORT"]


def test_a_layer_without_noise_has_no_number_in_json(run, models, tmp_path):
    silent = shutil.copytree(models[1], tmp_path / "silent")
    tensors = load_file(silent / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"].zero_()
    save_file(tensors, silent / "model.safetensors")
    reading = ("--tokens", 128, "--window", 64, "--targets", "v")
    code, out, err = run("calibrate", silent, "-o", tmp_path / "s.safetensors", *reading, "--json")
    assert code == 0, err
    first, second = (fit["sqnr"] for fit in json.loads(out, parse_constant=pytest.fail)["fits"])
    assert first is None
    assert second > 0


def test_a_dry_run_says_how_long_and_measures_nothing(run, models, tmp_path):
    arguments = ("search", models[1], "-o", tmp_path / "s", "--budget", "5.5", "--granularity", "g16", "--windows", 2)
    code, out, err = run(*arguments, "--window", 48, "--dry-run")
    assert code == 0, err
    assert "42 of 42 measurements to do, about" in out
    assert not (tmp_path / "s").exists()
