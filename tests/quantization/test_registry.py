"""Roundings by name: a registered rule serves every verb, and a wrong name or setting is refused early."""

from pathlib import Path

import pytest
import torch

from diffquant.checkpoints.compressed_tensors import weight_scale
from diffquant.errors import UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.quantization import roundings
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.quantization.roundings import Rounder, Rounding, register, rounding_named
from diffquant.recipe import Recipe
from diffquant.recipe.rounding import RoundingSettings
from tests.support.tables import in_one_test

OPTIONS = SweepOptions(
    tasks=("perplexity",),
    bits=(16,),
    targets=("weights",),
    task_options={"characters": 400, "window": 64, "stride": 32},
    dtype="float32",
)


class Truncate(Rounding):
    """Absmax scales, and every weight at the code towards zero."""

    name = "truncate"

    def prepare(self, source, schemes, settings, progress):
        return Rounder(truncated)


def truncated(name, values, scheme, dtype):
    scale = weight_scale(values, scheme, dtype)
    view, _ = scheme.sharing.view(values)
    codes = (view / scale.float().view(*view.shape[:-1], 1)).trunc()
    return codes.to(torch.int8).reshape(values.shape), scale


@pytest.fixture
def truncate():
    """The toy rule, known for one test."""
    register(Truncate())
    yield
    del roundings.ROUNDINGS["truncate"]


def test_a_rounding_needs_its_file_alone(truncate, checkpoint, tmp_path):
    file = tmp_path / "truncated.yaml"
    file.write_text("weights: 4:g16\nrounding: truncate\n")
    recipe = Recipe.read(file)
    report = quantize(checkpoint, tmp_path / "low", recipe)
    stored, simulated, plain = load(tmp_path / "low"), load(checkpoint, recipe), load(checkpoint)
    nearest = load(checkpoint, Recipe.of(weights="4:g16"))
    name = "model.layers.1.mlp.down_proj.weight"
    ours, exact, near = (each.get_parameter(name) for each in (simulated, plain, nearest))
    assert torch.equal(stored.get_parameter(name), ours)
    # Towards zero, where the nearest code may lie away from it.
    assert (ours.abs() <= exact.abs() + 1e-6).all()
    assert (near.abs() > exact.abs() + 1e-6).any()
    assert report.errors[0].error > 0

    result = run_sweep([checkpoint], OPTIONS.__class__(**vars(OPTIONS) | {"recipes": (file,)}), tmp_path / "sweep")
    swept = {each.point.target: each.result.details["perplexity"] for each in result.cells}
    alone = evaluate(checkpoint, recipe, OPTIONS)["perplexity"].details["perplexity"]
    assert swept["recipe"] == alone == evaluate(tmp_path / "low", None, OPTIONS)["perplexity"].details["perplexity"]
    assert swept["recipe"] != swept[""]


def test_recipes_that_differ_in_rounding_alone_are_different_rows(checkpoint, tmp_path):
    files = []
    for name, rounding in (("near", "nearest"), ("fitted", "mse"), ("made", "{name: gptq, tokens: 256, window: 64}")):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(f"weights: 3:g16\nrounding: {rounding}\n")
    options = OPTIONS.__class__(**vars(OPTIONS) | {"recipes": tuple(files)})
    rows = {
        each.point.granularity: each.result.details for each in run_sweep([checkpoint], options, tmp_path / "out").cells
    }
    for file in files:
        alone = evaluate(checkpoint, Recipe.read(file), OPTIONS)["perplexity"].details["perplexity"]
        assert rows[file.stem]["perplexity"] == alone
    assert len({rows[file.stem]["kl"] for file in files}) == 3
    assert rows["made"]["kl"] < rows["near"]["kl"]


def test_a_cell_follows_the_contents_of_the_text_that_its_rounding_reads(checkpoint, tmp_path):
    text, file = tmp_path / "read.txt", tmp_path / "made.yaml"
    file.write_text(f"weights: 3:g16\nrounding: {{name: gptq, text: {text}, tokens: 256, window: 64}}\n")
    options = OPTIONS.__class__(**vars(OPTIONS) | {"recipes": (file,)})
    cells = []
    for words in ("one of the first books ", "quite another matter of seas ", "one of the first books "):
        text.write_text(words * 200)
        run_sweep([checkpoint], options, tmp_path / "out")
        cells.append(len(list((tmp_path / "out" / "cells").glob("*.json"))))
    # The 16-bit cell and one of the recipe, one more for another text, none for the first one again.
    assert cells == [2, 3, 3]


@in_one_test(
    ("rounding", "message"),
    [
        ("gtpq", r"unknown rounding 'gtpq'; did you mean 'gptq'"),
        ({"name": "mse", "tokens": 64}, r"rounding='gptq or tuned'; give them only with it"),
        ({"name": "gptq", "text": "absent.txt"}, r"cannot read text from absent\.txt"),
        ({"name": "gptq", "tokens": 512, "window": 512, "text": "SHORT"}, r"fewer than one window"),
        ({"name": "gptq", "tokens": 256, "window": 512}, r"256 tokens do not fill a window of 512"),
    ],
)
def test_a_rounding_that_cannot_be_is_refused_before_anything_is_written(checkpoint, tmp_path, rounding, message):
    (tmp_path / "short.txt").write_text("a few words of text")
    if isinstance(rounding, dict) and rounding.get("text") == "SHORT":
        rounding["text"] = str(tmp_path / "short.txt")
    recipe = Recipe.of(weights="4:g16", rounding=rounding)
    with pytest.raises(UsageError, match=message):
        quantize(checkpoint, tmp_path / "low", recipe)
    with pytest.raises(UsageError, match=message):
        load(checkpoint, recipe)
    assert not (tmp_path / "low").exists()


def test_a_name_is_taken_once():
    with pytest.raises(UsageError, match="there is a rounding 'mse' already"):
        register(rounding_named("mse"))


def test_scales_that_span_rows_are_refused_before_a_text_is_read(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(type(rounding_named("gptq")), "prepare", lambda *_: pytest.fail("a text was read"))
    for rounding in ("mse", "gptq"):
        recipe = Recipe.of(weights="4:g16", overrides={"*.o_proj": "8:tensor"}, rounding=rounding)
        for verb in (lambda r: quantize(checkpoint, tmp_path / "low", r), lambda r: load(checkpoint, r)):
            with pytest.raises(UsageError, match=rf"{rounding}' rounds row by row, but .*layers\.0\.self_attn\.o_proj"):
                verb(recipe)


def test_settings_make_the_round_trip_through_yaml(tmp_path):
    settings = {"name": "gptq", "text": "books.txt", "tokens": 4096}
    recipe = Recipe.of(weights="4:g32", rounding=settings)
    assert recipe.rounding == RoundingSettings("gptq", Path("books.txt"), 4096)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert Recipe.read(tmp_path / "recipe.yaml") == recipe
    assert recipe.to_dict()["rounding"] == settings
    chosen = Recipe.of(weights="4:g32", rounding={"name": "gptq", "target": "layer", "order": "activation"})
    assert chosen.rounding == RoundingSettings("gptq", target="layer", order="activation")
    assert Recipe.from_dict(chosen.to_dict()) == chosen
    assert Recipe.of(weights=4, rounding="mse").to_dict()["rounding"] == "mse"
