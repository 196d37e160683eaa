"""Attention taken apart equals the model's own, and noise measured on it predicts what rounding costs."""

import json
import sys

import pytest
import torch

from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from diffquant.support.program import run_program
from studies import figure8, figure8_plots
from studies.logit_noise import Reading, difference, divergences, layers_of, observed, predictions_of, sensitivity
from tests.support.tiny_lm import tokenizer

SPECS = {
    "plain": DiffSpec(4, 2, 8, 8, maps=1),
    "v1": DiffSpec(2, 2, 8, 16, lam="exp", post_norm="affine", scale_by_init=True),
    "v2": DiffSpec(4, 2, 8, 8, shared_k=True, lam="sigmoid"),
}


def readings_of(sequences):
    return [Reading(torch.randint(0, 400, (sequences, 30), generator=torch.Generator().manual_seed(1)), 29)]


READINGS = readings_of(3)


def random_model(kind):
    torch.manual_seed(0)
    config = DiffTransformerConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        spec=SPECS[kind].to_dict(),
    )
    return DiffTransformer(config).eval()


@pytest.mark.parametrize("text", ["16", "4:tensor", "3:pair", "4:row:alike", "3:row:shift"])
@pytest.mark.parametrize("kind", SPECS)
def test_attention_taken_apart_equals_the_models_own(kind, text):
    model, scheme = random_model(kind), Scheme.parse(text)
    model.apply_recipe(Recipe(logits=scheme))
    (expected,) = predictions_of(model, READINGS)
    model.apply_recipe(Recipe())

    def see(attention):
        logits = attention.rounded(scheme)[1] if scheme.quantizes else attention.logits
        return difference(attention.terms(logits))

    with observed(model, see):
        (found,) = predictions_of(model, READINGS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_noise_of_opposite_signs_costs_what_the_quadratic_form_says():
    model = random_model("v1")
    exact = predictions_of(model, READINGS)
    found = {shares: sensitivity(model, READINGS, exact, 1, shares) for shares in [(1, 0), (0, 1), (1, 1), (1, -1)]}
    measured = dict(zip(("first", "second", "both"), list(found.values()), strict=False))
    assert figure8.costs(measured, "4:row:alike")[1] == pytest.approx(found[1, -1], rel=0.05)


@pytest.mark.parametrize("kind", SPECS)
def test_range_times_sensitivity_predicts_what_rounding_costs(kind):
    schemes = [Scheme.parse(text) for text in ("8:tensor", "8:head:alike", "6:head", "6:pair", "6:head:alike")]
    # Fewer sequences have fewer roundings in them, whose own noise is larger than what the formula may be wrong by.
    found = figure8.analyse(random_model(kind), readings_of(48), schemes)
    for scheme in map(str, schemes):
        assert figure8.predicted(found, scheme) == pytest.approx(figure8.mean_kl(found, scheme).mean, rel=0.2)


def test_errors_before_and_after_the_norm_and_cancellation():
    layer = layers_of(random_model("v1"), READINGS, [Scheme.parse("8:row"), Scheme.parse("4:row")])[1]
    assert layer["cancellation"] > 0
    assert layer["lam"]["min"] == layer["lam"]["max"]
    for when in ("before_norm", "after_norm"):
        # Four bits are sixteen times as large a step, and a little more.
        assert 10 < layer["errors"]["4:row"][when] / layer["errors"]["8:row"][when] < 25


def test_kl_is_each_sequences_own():
    exact = [torch.zeros(2, 1, 4)]
    moved = [torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[3.0, 0.0, 0.0, 0.0]]])]
    found = divergences(exact, moved)
    expected = torch.nn.functional.kl_div(
        moved[0].log_softmax(-1), exact[0].log_softmax(-1), log_target=True, reduction="none"
    )
    assert found == pytest.approx(expected.sum((1, 2)).tolist())
    assert found[0] == 0


def run_to_its_end(command):
    with pytest.raises(SystemExit) as end:
        run_program(command)
    assert end.value.code == 0


def test_the_program_writes_a_file_a_model_and_does_not_measure_it_again(tmp_path, monkeypatch, capsys):
    for kind in ("plain", "v1"):
        random_model(kind).save_pretrained(tmp_path / kind)
        tokenizer().save_pretrained(tmp_path / kind)
    out = tmp_path / "out"
    arguments = [str(tmp_path / "plain"), str(tmp_path / "v1"), "-o", str(out), "--characters", "400"]
    arguments += ["--window", "32", "--bits", "8,4", "--granularity", "tensor,row:shift"]
    monkeypatch.setattr(sys, "argv", ["figure8", *arguments])
    run_to_its_end(figure8.main)
    said = capsys.readouterr().out
    assert "v1 against plain" in said
    found = json.loads((out / "v1.json").read_text())
    assert list(found["kl"]) == ["8:tensor", "4:tensor", "8:row:shift", "4:row:shift"]
    assert (out / "kl.png").exists()
    assert (out / "prediction.png").exists()
    monkeypatch.setattr(figure8, "measure_model", None)
    monkeypatch.setattr(figure8_plots, "write_plots", lambda *_: None)
    run_to_its_end(figure8.main)
    assert capsys.readouterr().out == said
