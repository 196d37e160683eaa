"""The rule that weights are rounded by where none is named, and what an effort stands for."""

import json
import logging

import pytest

import diffquant
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.planning import estimate_seconds
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.tables import in_one_test


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "model")


def rule_of(folder):
    return json.loads((folder / "diffquant.json").read_text())["rounding"]["name"]


@in_one_test("given", ["4:g16", {"weights": "4:g16"}])
def test_what_is_typed_without_a_rule_is_rounded_by_mse(model, tmp_path, given):
    report = diffquant.quantize(model, tmp_path / "out", given)
    assert rule_of(tmp_path / "out") == "mse"
    assert "by mse" in report.summary()
    nearest = diffquant.quantize(model, tmp_path / "nearest", given, rounding="nearest")
    assert all(
        ours.error < theirs.error
        for ours, theirs in zip(
            sorted(report.errors, key=lambda e: e.name), sorted(nearest.errors, key=lambda e: e.name), strict=True
        )
    )


def test_a_stored_recipe_without_a_rule_keeps_its_meaning(model, tmp_path):
    diffquant.quantize(model, tmp_path / "old", {"weights": "4:g16"}, rounding="nearest")
    stored = tmp_path / "old" / "recipe.yaml"
    assert "rounding" not in stored.read_text()
    for name, recipe in {"file": stored, "text": str(stored), "object": Recipe.of(weights="4:g16")}.items():
        diffquant.quantize(model, tmp_path / name, recipe)
        assert rule_of(tmp_path / name) == "nearest"
        again, old = ((tmp_path / each / "model.safetensors").read_bytes() for each in (name, "old"))
        assert again == old


def test_schemes_that_mse_cannot_do_are_rounded_to_nearest_and_it_is_said(model, tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    diffquant.quantize(model, tmp_path / "out", {"weights": "8:tensor"})
    assert rule_of(tmp_path / "out") == "nearest"
    assert "rounding by nearest, because" in caplog.text


@in_one_test(("effort", "rule"), [("fast", "mse"), ("balanced", "gptq"), ("best", "tuned")])
def test_an_effort_is_a_rule(model, tmp_path, effort, rule):
    class Planned(Exception):
        pass

    def stop(plan):
        assert plan.recipe.rounding.name == rule
        raise Planned

    with pytest.raises(Planned):
        diffquant.quantize(model, tmp_path / "out", {"weights": "4:g16"}, effort=effort, on_plan=stop)


def test_an_effort_beside_a_rule_and_one_that_is_none_are_refused(model, tmp_path):
    with pytest.raises(UsageError, match="effort chooses the rounding rule; leave out rounding"):
        diffquant.quantize(model, tmp_path / "out", {"weights": "4:g16"}, effort="best", rounding="mse")
    with pytest.raises(UsageError, match="unknown effort 'bets'; did you mean 'best'"):
        diffquant.quantize(model, tmp_path / "out", {"weights": "4:g16"}, effort="bets")


def test_an_estimate_grows_with_what_a_rule_reads(model):
    source = open_source(model)

    def seconds(**rounding):
        return estimate_seconds(source, plan_quantization(source, Recipe.of(weights="4:g16", rounding=rounding)))

    assert seconds(name="nearest") > 0
    short, long = (seconds(name="gptq", tokens=tokens) for tokens in (1000, 100_000))
    assert long > 10 * short > 0
