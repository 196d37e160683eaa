"""Attention taken apart equals the model's own, and noise measured on it predicts what rounding costs."""

import json
import sys

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from diffquant.data import books_text
from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.program import run_program
from research.studies import figure8, figure8_model, figure8_plots
from research.studies.logit_noise import (
    Reading,
    difference,
    divergences,
    layers_of,
    observed,
    predictions_of,
    sensitivity,
)
from tests.support.tiny_lm import tokenizer

SPECS = {
    "plain": DiffSpec(4, 2, 8, 8, maps=1),
    "v1": DiffSpec(2, 2, 8, 16, lam="exp", post_norm="affine", scale_by_init=True),
    "v2": DiffSpec(4, 2, 8, 8, shared_k=True, lam="sigmoid"),
    "gated": DiffSpec(4, 2, 8, 8, maps=1, output_gate=True),
}
READINGS = [Reading(torch.randint(0, 400, (3, 30), generator=torch.Generator().manual_seed(1)), 29)]
# Enough that the noise which measures a sensitivity, and the logits that are rounded, are not few.
MANY_READINGS = [Reading(torch.randint(0, 400, (48, 30), generator=torch.Generator().manual_seed(2)), 29)]


def random_model(kind, seed=0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = DiffTransformerConfig(
        **sizes, initializer_range=0.3, rope_parameters=rope, tie_word_embeddings=True, spec=SPECS[kind].to_dict()
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


def test_signals_with_gates_are_refused():
    spec = DiffSpec(4, 2, 8, 8, shared_k=True, lam="two-gates").to_dict()
    config = random_model("v2").config
    config.spec = spec
    with pytest.raises(UsageError, match="signals have gates"), observed(DiffTransformer(config), lambda _: None):
        pass


def test_noise_of_opposite_signs_costs_what_the_quadratic_form_says():
    model = random_model("v1")
    exact = predictions_of(model, READINGS)
    found = {shares: sensitivity(model, READINGS, exact, 1, shares) for shares in [(1, 0), (0, 1), (1, 1), (1, -1)]}
    measured = dict(zip(("first", "second", "both"), list(found.values()), strict=False))
    assert figure8_model.costs(measured, "4:row:alike")[1] == pytest.approx(found[1, -1], rel=0.05)


@pytest.mark.parametrize("kind", SPECS)
def test_range_times_sensitivity_predicts_what_rounding_costs(kind):
    model = random_model(kind)
    schemes = [Scheme.parse(text) for text in ("8:tensor", "8:map", "8:head", "8:pair", "8:head:alike")]
    found = figure8.analyse(model, MANY_READINGS, schemes) | {"reading": {}}
    for scheme in map(str, schemes):
        measured = figure8_model.mean_kl(found, scheme).mean
        assert figure8_model.predicted(found, scheme) == pytest.approx(measured, rel=0.15)


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


def result_of(kl, windows=2, **reading):
    return {"reading": {"windows": windows, **reading}, "kl": {"4:row": kl}}


def test_intervals_are_students_over_passages_and_not_over_windows():
    kl = [0.10, 0.12, 0.30, 0.28, 0.05, 0.05, 0.22, 0.20]
    expected = scipy_stats.ttest_1samp(np.reshape(kl, (4, 2)).mean(1), 0).confidence_interval(0.95)
    found = figure8_model.mean_kl(result_of(kl), "4:row")
    assert found.mean == pytest.approx(np.mean(kl))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_each_book_has_its_own_advantage():
    """Passages of two books take turns; DIFF loses a bit on the first and wins one on the second."""
    diff, plain = result_of([4.0, 4.0, 1.0, 1.0] * 2, books=2), result_of([1.0, 1.0, 4.0, 4.0] * 2, books=2)
    assert figure8_model.advantage_by_book(diff, plain, "4:row") == pytest.approx([-1.0, 1.0])
    assert figure8_model.advantage_by_book(result_of([1.0]), result_of([1.0]), "4:row") == []


def test_passages_are_read_in_their_middle():
    text, settings = books_text()[:20000], figure8.Settings(passages=3, windows=2, window=32)
    ids = torch.cat(
        [reading.ids for reading in figure8.prose_readings(random_model("v1"), tokenizer(), text, settings)]
    )
    passage = tokenizer().encode(text[6666:13332])
    first = (len(passage) - 66) // 2
    assert ids.shape == (6, 33)
    assert ids[2:4].flatten().tolist() == passage[first : first + 66]


def test_passages_too_short_for_their_windows_are_refused():
    settings = figure8.Settings(passages=50, windows=4, window=64)
    with pytest.raises(UsageError, match=r"passage 0 of 50 has \d+ tokens; 4 windows of 64 take 260"):
        figure8.prose_readings(random_model("v1"), tokenizer(), books_text()[:4000], settings)


def run_to_its_end(command):
    with pytest.raises(SystemExit) as end:
        run_program(command)
    assert end.value.code == 0


def test_the_program_writes_a_file_a_model_and_does_not_measure_it_again(tmp_path, monkeypatch, capsys):
    for kind in ("plain", "v1"):
        random_model(kind).save_pretrained(tmp_path / kind)
        tokenizer().save_pretrained(tmp_path / kind)
    out = tmp_path / "out"
    arguments = [str(tmp_path / "plain"), str(tmp_path / "v1"), "-o", str(out), "--passages", "8"]
    arguments += ["--windows", "2", "--window", "32", "--bits", "8,4", "--granularity", "tensor,row:shift"]
    monkeypatch.setattr(sys, "argv", ["figure8", *arguments])
    run_to_its_end(figure8.main)
    said = capsys.readouterr().out
    assert "v1 against plain" in said
    found = json.loads((out / "v1.json").read_text())
    assert [len(kl) for kl in found["kl"].values()] == [16] * 4
    assert list(found["kl"]) == ["8:tensor", "4:tensor", "8:row:shift", "4:row:shift"]
    assert (out / "kl.png").exists()
    assert (out / "prediction.png").exists()
    monkeypatch.setattr(figure8, "measure_model", None)
    monkeypatch.setattr(figure8_plots, "write_plots", lambda *_: None)
    run_to_its_end(figure8.main)
    assert capsys.readouterr().out == said
    # Another model of that name.
    random_model("v1", seed=1).save_pretrained(tmp_path / "v1")
    with pytest.raises(UsageError, match=r"v1\.json is of another model than .*v1; name another folder"):
        figure8.main([tmp_path / "v1"], out)
